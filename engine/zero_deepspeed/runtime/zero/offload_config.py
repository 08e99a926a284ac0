"""DeepSpeed's `deepspeed.runtime.zero.offload_config`: what `engine.offload_states` takes."""

from zero_engine.offload_states import OffloadDeviceEnum, OffloadStateTypeEnum

__all__ = ["OffloadDeviceEnum", "OffloadStateTypeEnum"]
