"""The pieces of a rank as columns of numbers, checked.

What is planned for pieces, a file or the reading of files, is planned for all of them at once, and
for nothing that could not be stored.

Called by `layout` and `reader`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.format.fragments import Ints
from zero_checkpoint.format.pieces import Piece, TensorId, TensorInfo
from zero_checkpoint.format.table import TensorTable, numel


class Pieces(tuple[Piece, ...]):
    """Pieces of which the columns are kept: whoever saves or loads them again has them already."""

    _known: tuple[TensorTable, Extents] | None = None

    def extents(self, table: TensorTable) -> Extents:
        """See `extents`."""
        if self._known is None or self._known[0] is not table:
            self._known = (table, _extents(self, table))
        return self._known[1]


class Extents(NamedTuple):
    """The columns, each int64 [pieces]."""

    tensor: Ints
    """Position of the tensor in the table."""
    start: Ints
    """First element, in the flattened tensor."""
    length: Ints
    """Elements; may be none."""
    itemsize: Ints
    """Bytes of an element."""
    memory: Ints
    """Which allocation the data lie in: those that adjoin in it are one to whoever reads."""
    address: Ints
    """Of the first byte."""


def extents(pieces: Sequence[Piece], table: TensorTable) -> Extents:
    """Where each piece lies in its tensor.

    Raises:
        CheckpointError: A piece is of no known tensor, leaves its bounds, or is not a contiguous
            vector of the tensor's dtype.
    """
    return (pieces if isinstance(pieces, Pieces) else Pieces(pieces)).extents(table)


def _extents(pieces: Sequence[Piece], table: TensorTable) -> Extents:
    index = table.index
    tensor = _ints([index.get(piece.id, -1) for piece in pieces])
    start = _ints([piece.start for piece in pieces])
    length = _ints([piece.data.numel() for piece in pieces])
    # Of an unknown tensor, -1, nothing is in bounds: it has the last number, less than nothing.
    in_bounds = (start >= 0) & (start + length <= np.append(table.numels, -1)[tensor])
    for bad in np.flatnonzero(~(in_bounds & _vectors(pieces, tensor, table)))[:1].tolist():
        raise _unstorable(pieces[bad], table)
    itemsize = np.append(table.itemsizes, 0)[tensor]
    memory = _ints([piece.data.untyped_storage().data_ptr() for piece in pieces])
    return Extents(
        tensor, start, length, itemsize, memory, _ints([piece.data.data_ptr() for piece in pieces])
    )


def _vectors(pieces: Sequence[Piece], tensors: Ints, table: TensorTable) -> npt.NDArray[np.bool_]:
    """[pieces], whether each is a contiguous vector of its tensor's dtype."""
    dtypes = [*(info.dtype for info in table.values()), None]
    good = [
        data.dtype == dtypes[tensor] and data.dim() == 1 and data.is_contiguous()
        for (_, _, data), tensor in zip(pieces, tensors.tolist(), strict=True)
    ]
    return np.array(good, dtype=np.bool_)


def _ints(numbers: Sequence[int]) -> Ints:
    return np.array(numbers, dtype=np.int64)


def _unstorable(piece: Piece, tensors: Mapping[TensorId, TensorInfo]) -> CheckpointError:
    info, data = tensors.get(piece.id), piece.data
    if info is None:
        problem = "is not in the table of tensors"
    elif data.dtype != info.dtype:
        problem = f"is {data.dtype}, its tensor {info.dtype}"
    elif data.dim() != 1 or not data.is_contiguous():
        problem = f"has shape {tuple(data.shape)}, strides {data.stride()}; flatten it first"
    else:
        problem = f"leaves the {numel(info)} elements of its tensor"
    return CheckpointError(f"piece {describe(piece.id, piece.start, data.numel())} {problem}")


def describe(tensor: TensorId, start: int, length: int) -> str:
    """A run of elements as messages name it: `kind/fqn[start:end]`."""
    return f"{tensor.kind}/{tensor.fqn}[{start}:{start + length}]"
