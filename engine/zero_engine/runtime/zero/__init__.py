"""DeepSpeed's `deepspeed.runtime.zero`."""

from zero_engine.zero import GatheredParameters, Init, register_external_parameter

__all__ = ["GatheredParameters", "Init", "register_external_parameter"]
