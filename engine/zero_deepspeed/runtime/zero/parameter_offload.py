"""DeepSpeed's `deepspeed.runtime.zero.parameter_offload`."""

from zero_engine.sharding.parameter_offload import DeepSpeedZeRoOffload

__all__ = ["DeepSpeedZeRoOffload"]
