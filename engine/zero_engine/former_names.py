"""Former names, and names of DeepSpeed's that do not exist here: an error for each, with a remedy.

Must always hold: for a mere question (`hasattr`, `importlib.util.find_spec`) such a name does not
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
    "zero_deepspeed.env_report": _REPORT,
    "zero_deepspeed.runtime.zero.stage3": _ESTIMATORS,
    "zero_deepspeed.runtime.zero.stage_1_and_2": _ESTIMATORS,
}
"""Former name -> its present name, or a sentence with the remedy."""


_INFERENCE = (
    "there are no kernels for inference; call the trained module itself, or serve what "
    "zero-ckpt export writes"
)
_PIPELINE = (
    "there is no pipeline parallelism; give initialize() the whole model: stage 3 divides what one "
    "rank cannot hold"
)
_TENSOR = "there is no tensor parallelism; stage 3 divides what one rank cannot hold"
_SEQUENCE = "each rank computes whole sequences; recompute activations of long ones"
_DATA = (
    "select and order samples in the dataset, and set elastic.shuffle to false: what a step trains "
    "on follows from seed and position alone"
)
_CHECKPOINTS = (
    "every checkpoint loads at every world size; zero-ckpt import --from deepspeed reads those of "
    "DeepSpeed"
)
_LAYERS = "there are no layers for it; call torch.nn.functional.scaled_dot_product_attention"
_LOADS = (
    "leave it out: no checkpoint contains pickled objects, and the loss scale is engine.loss_scale"
)

ABSENT_NAMES = {
    "zero_deepspeed.DeepSpeedConfig": "zero_engine.config.load_config(config) reads and checks one",
    "zero_deepspeed.DeepSpeedHybridEngine": _INFERENCE,
    "zero_deepspeed.DeepSpeedTransformerConfig": _LAYERS,
    "zero_deepspeed.DeepSpeedTransformerLayer": _LAYERS,
    "zero_deepspeed.InferenceEngine": _INFERENCE,
    "zero_deepspeed.PipelineEngine": _PIPELINE,
    "zero_deepspeed.PipelineModule": _PIPELINE,
    "zero_deepspeed.add_tuning_arguments": 'write the "scheduler" section into the config',
    "zero_deepspeed.autotuning": (
        "nothing tunes itself; python -m zero_engine FILE estimates the memory of a config"
    ),
    "zero_deepspeed.checkpoint.DeepSpeedCheckpoint": _CHECKPOINTS,
    "zero_deepspeed.compression.compress": (
        "the model is trained as it is; compress what save_16bit_model exports"
    ),
    "zero_deepspeed.default_inference_config": _INFERENCE,
    "zero_deepspeed.inference": _INFERENCE,
    "zero_deepspeed.init_inference": _INFERENCE,
    "zero_deepspeed.linear": "LoRA of the package peft works at every stage",
    "zero_deepspeed.model_implementations": _INFERENCE,
    "zero_deepspeed.module_inject": _INFERENCE,
    "zero_deepspeed.monitor": (
        "engine.monitor.write_events adds curves to those of csv_monitor, tensorboard and wandb in "
        "the config"
    ),
    "zero_deepspeed.ops.sparse_attention": (
        "DeepSpeed has removed it, too; call torch's flex_attention in the model"
    ),
    "zero_deepspeed.ops.transformer": _LAYERS,
    "zero_deepspeed.pipe": _PIPELINE,
    "zero_deepspeed.runtime.bf16_optimizer": _LOADS,
    "zero_deepspeed.runtime.data_pipeline": _DATA,
    "zero_deepspeed.runtime.fp16": _LOADS,
    "zero_deepspeed.runtime.hybrid_engine": _INFERENCE,
    "zero_deepspeed.runtime.pipe": _PIPELINE,
    "zero_deepspeed.runtime.progressive_layer_drop": (
        "the model decides what runs; leave layers out in its forward"
    ),
    "zero_deepspeed.runtime.sequence_parallel": _SEQUENCE,
    "zero_deepspeed.runtime.tensor_parallel": _TENSOR,
    "zero_deepspeed.runtime.zero.config": _LOADS,
    "zero_deepspeed.sequence": _SEQUENCE,
    "zero_deepspeed.tp_model_init": _TENSOR,
    "zero_deepspeed.utils.groups": (
        "all ranks are data-parallel: torch.distributed has their number and their group"
    ),
}
"""A name of DeepSpeed's that has no equivalent -> what to do instead."""


def _message(name: str, spoken: str) -> str | None:
    if (instead := ABSENT_NAMES.get(name)) is not None:
        return f"{spoken} does not exist here: {instead}"
    if (now := FORMER_NAMES.get(name)) is None:
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
    """Let failing imports of the names in the tables raise with the new place or the remedy.

    Args:
        package: The name of the package in the table.
        spoken: The name by which scripts import it, if it differs.
    """
    sys.meta_path.append(_Last(package, spoken or package))
