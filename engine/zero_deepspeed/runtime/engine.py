"""DeepSpeed's `deepspeed.runtime.engine`."""

from zero_engine.core.engine import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
