"""DeepSpeed's `deepspeed.runtime.zero`."""

from typing import TYPE_CHECKING

from zero_deepspeed.absent_names import raising_getattr
from zero_deepspeed.runtime.zero import offload_config, partition_parameters, tiling
from zero_deepspeed.zero import (
    GatheredParameters,
    Init,
    TiledLinear,
    register_external_parameter,
    unwrap_model_for_generation,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "offload_config",
    "partition_parameters",
    "register_external_parameter",
    "tiling",
    "unwrap_model_for_generation",
]

if not TYPE_CHECKING:  # for which every name would be there
    __getattr__ = raising_getattr(__name__)
