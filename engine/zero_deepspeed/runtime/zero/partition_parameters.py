"""DeepSpeed's `deepspeed.runtime.zero.partition_parameters`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zero_deepspeed.accelerator import get_accelerator
from zero_deepspeed.zero import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    register_external_parameter,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "get_accelerator",
    "register_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]

_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., torch.Tensor], *_: Any, **__: Any
) -> Callable[..., torch.Tensor]:
    """Return `fn`: DeepSpeed's Init wraps torch's constructors in this, ours leaves them unchanged.

    transformers replaces this function while it makes a model.
    """
    return fn
