"""DeepSpeed's `deepspeed.checkpoint.utils`: copies for libraries that save by themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

__all__ = ["clone_tensors_for_torch_save"]

_CPU = torch.device("cpu")


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = _CPU) -> Any:
    """A copy of a nest of tensors, each in separate memory; tied parameters stay one tensor."""
    # A parameter is a view of its unit's flat buffer: torch.save would write the whole buffer. If
    # tied parameters became two tensors, a library would write both.
    clones: dict[tuple[Any, ...], Tensor] = {}

    def clone(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        place = _place(value)
        if place not in clones:
            clones[place] = value.detach().to(device, copy=True)
        return clones[place]

    return tree_map(clone, item)


def _place(data: Tensor) -> tuple[Any, ...]:
    """A key that is equal for tensors of the same elements in the same order; unique if empty."""
    if data.numel() == 0:
        return (id(data),)
    # Meta tensors have no address, but each its own storage, unless they are tied.
    start = data.data_ptr() or (data.untyped_storage()._cdata, data.storage_offset())
    return (start, data.dtype, data.shape, data.stride(), data.device)
