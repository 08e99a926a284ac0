"""DeepSpeed's `deepspeed.ops`: optimizers with torch's kernels, under DeepSpeed's names."""

from typing import TYPE_CHECKING

from zero_deepspeed.absent_names import raising_getattr
from zero_deepspeed.ops import adagrad, adam, lamb, lion, op_builder

__all__ = ["adagrad", "adam", "lamb", "lion", "op_builder"]

__compatible_ops__ = {builder.NAME: builder.offered for builder in op_builder.BUILDERS}
"""By DeepSpeed's names, which of its compiled operators there is here, by torch's kernels."""

if not TYPE_CHECKING:  # for which every name would be there
    __getattr__ = raising_getattr(__name__)
