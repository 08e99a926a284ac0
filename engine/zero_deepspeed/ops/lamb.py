"""DeepSpeed's `deepspeed.ops.lamb`."""

from zero_engine.optim.lamb import Lamb as FusedLamb

__all__ = ["FusedLamb"]
