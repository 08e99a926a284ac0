"""DeepSpeed's `deepspeed.runtime.activation_checkpointing`."""

from zero_engine import checkpointing

__all__ = ["checkpointing"]
