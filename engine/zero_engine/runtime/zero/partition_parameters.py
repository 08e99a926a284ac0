"""DeepSpeed's `deepspeed.runtime.zero.partition_parameters`."""

from zero_engine.zero import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    register_external_parameter,
)

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus", "register_external_parameter"]
