"""DeepSpeed's `deepspeed.runtime.zero.offload_config`: the arguments of `engine.offload_states`."""

from zero_engine.offload_states import OffloadDeviceEnum, OffloadStateTypeEnum

__all__ = ["OffloadDeviceEnum", "OffloadStateTypeEnum"]
