"""DeepSpeed's `deepspeed.runtime.zero`."""

from typing import TYPE_CHECKING

from zero_deepspeed.runtime.zero import offload_config, partition_parameters
from zero_deepspeed.zero import GatheredParameters, Init, register_external_parameter
from zero_engine.former_names import raising_getattr

__all__ = [
    "GatheredParameters",
    "Init",
    "offload_config",
    "partition_parameters",
    "register_external_parameter",
]

if not TYPE_CHECKING:  # for which every name would be there
    __getattr__ = raising_getattr(__name__)
