"""Former names: an error for each, with its new place or a remedy.

Must always hold: for a mere question (`hasattr`, `importlib.util.find_spec`) a former name does not
exist; its use or import is an error with the new place or the remedy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import NoReturn

_ESTIMATORS = (
    "run python -m zero_engine FILE --parameters N instead of DeepSpeed's estimators: it "
    "prints the memory per rank of a config"
)
_ERRORS = (
    "ZeroError (EngineError before), ConfigError, PeerLost and CommitRefused are in "
    "zero_contract.errors, CheckpointError, DamagedCheckpoint and ModelMismatch in "
    "zero_checkpoint.errors, Diverged in zero_comm.errors, TierError in zero_engine.tiers.places"
)
_REPORT = "run python -m torch.utils.collect_env, which describes the machine"

FORMER_NAMES = {
    "zero_engine.CheckpointError": "zero_checkpoint.errors.CheckpointError",
    "zero_engine.CommitRefused": "zero_contract.errors.CommitRefused",
    "zero_engine.ConfigError": "zero_contract.errors.ConfigError",
    "zero_engine.DamagedCheckpoint": "zero_checkpoint.errors.DamagedCheckpoint",
    "zero_engine.DeepSpeedConfigError": "zero_deepspeed.DeepSpeedConfigError",
    "zero_engine.DeepSpeedEngine": "zero_deepspeed.DeepSpeedEngine",
    "zero_engine.Diverged": "zero_comm.errors.Diverged",
    "zero_engine.EngineError": "zero_contract.errors.ZeroError",
    "zero_engine.ModelMismatch": "zero_checkpoint.errors.ModelMismatch",
    "zero_engine.PeerLost": "zero_contract.errors.PeerLost",
    "zero_engine.ZeroError": "zero_contract.errors.ZeroError",
    "zero_engine.accelerator": "zero_deepspeed.accelerator",
    "zero_engine.add_config_arguments": "zero_deepspeed.add_config_arguments",
    "zero_engine.as_deepspeed": "zero_deepspeed.as_deepspeed",
    "zero_engine.assembly": "zero_engine.core.initialize",
    "zero_engine.checkpoint": "zero_checkpoint",
    "zero_engine.checkpointing": "zero_deepspeed.checkpointing",
    "zero_engine.comm": "zero_deepspeed.comm",
    "zero_engine.compression": "zero_deepspeed.compression",
    "zero_engine.elastic": "zero_comm.agent_link",
    "zero_engine.engine": "zero_engine.core.engine",
    "zero_engine.env_report": _REPORT,
    "zero_engine.errors": _ERRORS,
    "zero_engine.get_accelerator": "zero_deepspeed.get_accelerator",
    "zero_engine.init_distributed": "zero_deepspeed.init_distributed",
    "zero_engine.log_dist": "zero_deepspeed.log_dist",
    "zero_engine.logger": "zero_deepspeed.logger",
    "zero_engine.moe": "zero_deepspeed.moe",
    "zero_engine.ops": "zero_deepspeed.ops",
    "zero_engine.read_ledger": "zero_data.ledger.read_ledger",
    "zero_engine.runtime": "zero_deepspeed.runtime",
    "zero_engine.samples": "zero_data",
    "zero_engine.utils": "zero_deepspeed.utils",
    "zero_engine.verify": "zero_data.ledger.verify",
    "zero_engine.zero": "zero_deepspeed.zero",
    "zero_deepspeed.Engine": "zero_deepspeed.DeepSpeedEngine",
    "zero_deepspeed.elasticity": (
        'write the "elasticity" section into the config: it chooses the batch, and every world '
        "size trains"
    ),
    "zero_deepspeed.env_report": _REPORT,
    "zero_deepspeed.runtime.zero.stage3": _ESTIMATORS,
    "zero_deepspeed.runtime.zero.stage_1_and_2": _ESTIMATORS,
}
"""Former name -> its present name, or a sentence with the remedy."""


def _message(name: str, spoken: str) -> str | None:
    now = FORMER_NAMES.get(name)
    if now is None:
        return None
    return f"there is no {spoken} any more: " + (now if " " in now else f"it is {now} now")


def raising_getattr(module: str) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a module that has names in the table."""

    def __getattr__(name: str) -> NoReturn:  # noqa: N807 - the function is a module's
        dotted = f"{module}.{name}"
        message = _message(dotted, dotted) or f"module {module!r} has no attribute {name!r}"
        raise AttributeError(message, name=name, obj=sys.modules.get(module))

    return __getattr__


class _Last(MetaPathFinder):
    """The last finder, for modules and `from package import name` that no other has found."""

    def __init__(self, package: str, spoken: str) -> None:
        self._package, self._spoken = package, spoken

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        caller = sys._getframe(1).f_back
        if caller is not None and caller.f_code.co_name == "find_spec":
            return  # importlib.util.find_spec, which imports nothing
        root, dot, rest = fullname.partition(".")
        if root == self._spoken and (message := _message(self._package + dot + rest, fullname)):
            # Without `name`: with it the import statement takes the name for one of no module.
            raise ModuleNotFoundError(message)


def explain_imports(package: str, spoken: str | None = None) -> None:
    """Let failing imports of a package's former names raise with the new place.

    Args:
        package: The name of the package in the table.
        spoken: The name by which scripts import it, if it differs.
    """
    sys.meta_path.append(_Last(package, spoken or package))
