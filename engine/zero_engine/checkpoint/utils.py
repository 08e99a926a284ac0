"""DeepSpeed's `deepspeed.checkpoint.utils`: what libraries call before they save by themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

__all__ = ["clone_tensors_for_torch_save"]

_CPU = torch.device("cpu")


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = _CPU) -> Any:
    """A copy of a nest of tensors, each with memory of its own.

    A parameter is a view of its unit's flat buffer: torch.save would write all of that.
    """

    def clone(value: Any) -> Any:
        return value.detach().to(device, copy=True) if isinstance(value, Tensor) else value

    return tree_map(clone, item)
