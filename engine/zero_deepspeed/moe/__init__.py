"""DeepSpeed's `deepspeed.moe`: there is no expert parallelism, see `layer`."""

from zero_deepspeed.moe import layer, utils

__all__ = ["layer", "utils"]
