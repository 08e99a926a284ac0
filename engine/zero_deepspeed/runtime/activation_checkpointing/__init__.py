"""DeepSpeed's `deepspeed.runtime.activation_checkpointing`."""

from zero_deepspeed import checkpointing

__all__ = ["checkpointing"]
