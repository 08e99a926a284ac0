"""DeepSpeed's `deepspeed.runtime.engine`."""

from zero_engine.engine import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
