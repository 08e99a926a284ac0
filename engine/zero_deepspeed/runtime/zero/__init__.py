"""DeepSpeed's `deepspeed.runtime.zero`."""

from zero_deepspeed.runtime.zero import offload_config, partition_parameters
from zero_deepspeed.zero import GatheredParameters, Init, register_external_parameter

__all__ = [
    "GatheredParameters",
    "Init",
    "offload_config",
    "partition_parameters",
    "register_external_parameter",
]
