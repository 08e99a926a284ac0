"""A box of an n-dimensional tensor as runs of elements of the flattened one.

Shards of a DTensor are boxes, in any dimension. A box that takes all of the last dimensions is few
runs, one that divides the last dimension is a run for each row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from zero_checkpoint.format.fragments import Ints
from zero_checkpoint.format.pieces import Piece, TensorId


def runs_of(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> tuple[Ints, int]:
    """The first element of each run, in order, and the length of all of them.

    The box has an offset and a size, not 0, in each dimension.
    """
    inner = len(shape)  # the dimensions from here on are whole
    while inner and sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)  # a run may take a part of one more
    starts = np.zeros(1, dtype=np.int64)
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        stride = math.prod(shape[dim + 1 :])
        steps = np.arange(size if dim < inner else 1, dtype=np.int64)
        starts = (starts[:, None] + (offset + steps) * stride).ravel()
    return starts, math.prod(sizes[inner:])


def cut(
    tensor: TensorId, shape: Sequence[int], offsets: Sequence[int], box: Tensor
) -> Iterator[Piece]:
    """The pieces that a contiguous box of a tensor consists of; none if it is empty."""
    if not box.numel():
        return
    starts, length = runs_of(shape, offsets, box.shape)
    for start, run in zip(starts.tolist(), box.view(-1, length).unbind(), strict=True):
        yield Piece(tensor, start, run)
