"""DeepSpeed's `deepspeed.compression`, of which scripts use the helpers alone."""

from typing import TYPE_CHECKING

from zero_deepspeed.absent_names import raising_getattr

if not TYPE_CHECKING:  # for which every name would be there
    __getattr__ = raising_getattr(__name__)
