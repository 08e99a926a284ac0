"""DeepSpeed's `deepspeed.ops.lamb`."""

from zero_engine.lamb import Lamb as FusedLamb

__all__ = ["FusedLamb"]
