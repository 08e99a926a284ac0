"""DeepSpeed's `deepspeed.moe`: there is no expert parallelism, see `layer`."""

from zero_engine.moe import layer, utils

__all__ = ["layer", "utils"]
