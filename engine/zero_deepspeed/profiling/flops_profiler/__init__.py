"""DeepSpeed's `deepspeed.profiling.flops_profiler`: operations and parameters of a model.

Owns the names; torch counts: matrix products, convolutions and attention, nothing elementwise. The
section "flops_profiler" of a config counts a step of an engine.
"""

from zero_deepspeed.profiling.flops_profiler.profiler import (
    FlopsProfiler,
    flops_to_string,
    get_model_profile,
    macs_to_string,
    number_to_string,
    params_to_string,
)

__all__ = [
    "FlopsProfiler",
    "flops_to_string",
    "get_model_profile",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
]
