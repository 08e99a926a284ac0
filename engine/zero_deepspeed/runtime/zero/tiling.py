"""DeepSpeed's `deepspeed.runtime.zero.tiling`."""

from zero_deepspeed.tiling import TiledLinear

__all__ = ["TiledLinear"]
