"""DeepSpeed's `deepspeed.profiling`."""

from zero_deepspeed.profiling import flops_profiler

__all__ = ["flops_profiler"]
