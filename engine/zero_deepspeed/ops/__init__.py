"""DeepSpeed's `deepspeed.ops`: optimizers with torch's kernels, under DeepSpeed's names."""

from typing import TYPE_CHECKING

from zero_deepspeed.ops import adagrad, adam, lamb, lion
from zero_engine.former_names import raising_getattr

__all__ = ["adagrad", "adam", "lamb", "lion"]

if not TYPE_CHECKING:  # for which every name would be there
    __getattr__ = raising_getattr(__name__)
