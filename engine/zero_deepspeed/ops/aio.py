"""DeepSpeed's `deepspeed.ops.aio`: asynchronous I/O, which tiers have without a compiled kernel."""

from zero_deepspeed.ops.op_builder import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]
