"""The state that is saved and loaded, as plain records: tensors, and each rank's pieces of them.

The atom of a checkpoint is a run of elements of one tensor, counted in the row-major flattened
*unpadded* tensor: `(kind, fqn)[start : start + len]`. The owned pieces of all ranks cover every
tensor exactly once, at any ZeRO stage and world size. The same list of pieces serves to save (read
from) and to load (filled in place), so a change of world size or stage is nothing but interval
intersection.

Source of the idea: DeepSpeed's universal checkpoint atoms (arXiv 2406.18820), without the
conversion; torchsnapshot's plan of plain requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, dtype

PARAM = "param"
"""The highest-precision copy of a parameter."""
BUFFER = "buffer"
"""A module buffer, owned whole by rank 0."""
OTHER = "other"
"""A tensor of neither a model nor an optimizer, under the key that its script gave it."""
# Any other kind is an optimizer key under its own name: "exp_avg", with one value per element, or,
# of an optimizer that is stepped whole, "row_var" or "factors.0", in another shape.
#
# A model may have tens of thousands of tensors, so the records of each are named tuples: cheap to
# make, to hash and to compare.


class TensorId(NamedTuple):
    """A tensor's identity: its kind and its fully qualified name in the user's module."""

    kind: str
    fqn: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.fqn}"


class TensorInfo(NamedTuple):
    """Shape and dtype of a whole, unsharded tensor."""

    shape: tuple[int, ...]
    dtype: dtype


class Piece(NamedTuple):
    """Elements [start, start + data.numel()) of one flattened tensor, owned by this rank.

    `data` is one-dimensional, contiguous, and of the tensor's dtype: a view of live state.
    """

    id: TensorId
    start: int
    data: Tensor


@dataclass(frozen=True, slots=True)
class State:
    """Everything that a rank contributes to a checkpoint, or wants from one.

    `tensors` and `meta` are equal on every rank; `pieces` are this rank's share.
    """

    tensors: Mapping[TensorId, TensorInfo]
    pieces: tuple[Piece, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Tied parameters: other name -> the name under which the tensor is stored."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """JSON: step, counters, param groups by FQN, scheduler, data position, seeds, weight hash."""
    spare: frozenset[TensorId] = frozenset()
    """In a load: tensors that the checkpoint may hold although they are not wanted."""
    visible: frozenset[int] = frozenset()
    """The addresses of memory that the script sees, and may write to between steps."""


# ---- boxes ----
# Shards of a DTensor are boxes, in any dimension. A box that takes all of the last dimensions is
# few runs of the flattened tensor, one that divides the last dimension is a run for each row.


def cut(
    tensor: TensorId, shape: Sequence[int], offsets: Sequence[int], box: Tensor
) -> Iterator[Piece]:
    """The pieces that a contiguous box of a tensor consists of; none if it is empty."""
    if not box.numel():
        return
    sizes = box.shape
    inner = len(shape)  # the dimensions from here on are whole
    while inner and sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)  # a run may take a part of one more
    starts = np.zeros(1, dtype=np.int64)
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        stride = math.prod(shape[dim + 1 :])
        steps = np.arange(size if dim < inner else 1, dtype=np.int64)
        starts = (starts[:, None] + (offset + steps) * stride).ravel()
    # All runs have one length, so the box is a matrix with a row for each.
    rows = box.view(-1, math.prod(sizes[inner:]))
    for start, run in zip(starts.tolist(), rows.unbind(), strict=True):
        yield Piece(tensor, start, run)
