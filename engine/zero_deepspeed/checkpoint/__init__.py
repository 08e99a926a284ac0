"""DeepSpeed's `deepspeed.checkpoint`: tensors copied out of flat buffers."""

from typing import TYPE_CHECKING

from zero_deepspeed.absent_names import raising_getattr

UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
"""The key under which scripts give their layout in `client_state`; without effect."""

if not TYPE_CHECKING:  # for which every name would be there
    __getattr__ = raising_getattr(__name__)
