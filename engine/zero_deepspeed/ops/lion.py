"""DeepSpeed's `deepspeed.ops.lion`."""

from zero_engine.optim.lion import Lion as DeepSpeedCPULion
from zero_engine.optim.lion import Lion as FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
