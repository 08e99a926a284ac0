"""DeepSpeed's `deepspeed.runtime.activation_checkpointing.checkpointing`."""

from zero_deepspeed.checkpointing import *  # noqa: F403
from zero_deepspeed.checkpointing import __all__  # noqa: F401
