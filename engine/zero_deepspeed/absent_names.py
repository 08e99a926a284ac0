"""Names of DeepSpeed's that do not exist here: an error for each, with the remedy.

For a mere question (`hasattr`, `importlib.util.find_spec`) such a name does not exist.
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
_REPORT = "run python -m torch.utils.collect_env, which describes the machine"
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
    "zero_deepspeed.env_report": _REPORT,
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
    "zero_deepspeed.runtime.zero.stage3": _ESTIMATORS,
    "zero_deepspeed.runtime.zero.stage_1_and_2": _ESTIMATORS,
    "zero_deepspeed.sequence": _SEQUENCE,
    "zero_deepspeed.tp_model_init": _TENSOR,
    "zero_deepspeed.utils.groups": (
        "all ranks are data-parallel: torch.distributed has their number and their group"
    ),
}
"""A name of DeepSpeed's that has no equivalent -> what to do instead."""


def raising_getattr(module: str) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a module that has names in the table."""

    def __getattr__(name: str) -> NoReturn:  # noqa: N807 - the function is a module's
        dotted = f"{module}.{name}"
        message = _message(dotted, dotted) or f"module {module!r} has no attribute {name!r}"
        raise AttributeError(message, name=name, obj=sys.modules.get(module))

    return __getattr__


def _message(name: str, spoken: str) -> str | None:
    instead = ABSENT_NAMES.get(name)
    return None if instead is None else f"{spoken} does not exist here: {instead}"


class _Last(MetaPathFinder):
    """The last finder, for modules and `from package import name` that no other has found."""

    def __init__(self, spoken: str) -> None:
        self._spoken = spoken

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        caller = sys._getframe(1).f_back
        if caller is not None and caller.f_code.co_name == "find_spec":
            return  # importlib.util.find_spec, which imports nothing
        root, dot, rest = fullname.partition(".")
        if root == self._spoken and (message := _message("zero_deepspeed" + dot + rest, fullname)):
            # Without `name`: with it the import statement takes the name for one of no module.
            raise ModuleNotFoundError(message)


def explain_imports(spoken: str) -> None:
    """Let failing imports of the names in the table, under the package name `spoken`, say why."""
    # The last: what another finder finds is there.
    sys.meta_path.append(_Last(spoken))
