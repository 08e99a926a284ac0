"""DeepSpeed's `deepspeed.runtime.engine`."""

from zero_deepspeed.engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
