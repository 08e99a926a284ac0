"""The tensors of a checkpoint and the pieces of a rank, all at once: order, sizes, JSON, columns.

A model may have tens of thousands of tensors, and a save or a load needs the same facts of each of
them several times. So each fact is computed once for all tensors, in NumPy if it is a number;
nothing changes a table after it was made.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.format.dtypes import name_of
from zero_checkpoint.format.fragments import Ints
from zero_checkpoint.format.pieces import Piece, TensorId, TensorInfo

T = TypeVar("T")


class TensorTable(dict[TensorId, TensorInfo]):
    """Every tensor, in the order of the manifest: a fragment names its tensor by the position."""

    @cached_property
    def index(self) -> Mapping[TensorId, int]:
        """The position of each tensor."""
        return {tensor: position for position, tensor in enumerate(self)}

    @cached_property
    def numels(self) -> Ints:
        """[tensors], elements of each."""
        return np.array([numel(info) for info in self.values()], dtype=np.int64)

    @cached_property
    def itemsizes(self) -> Ints:
        """[tensors], bytes of an element of each."""
        return np.array([info.dtype.itemsize for info in self.values()], dtype=np.int64)

    @cached_property
    def kind_names(self) -> frozenset[str]:
        """The kinds of all tensors."""
        return frozenset(tensor.kind for tensor in self)

    @cached_property
    def kinds(self) -> Ints:
        """[tensors], the number of each tensor's kind, in the order of their first tensors.

        Raises:
            CheckpointError: A kind cannot be part of a name.
        """
        numbers: dict[str, int] = {}
        each = [numbers.setdefault(tensor.kind, len(numbers)) for tensor in self]
        for kind in numbers:
            if not kind or "/" in kind:
                raise CheckpointError(f"tensor kind {kind!r} is empty or contains '/'")
        return np.array(each, dtype=np.int64)

    @cached_property
    def text(self) -> str:
        """The table as JSON: [kind, fqn, dtype, shape] of each.

        Raises:
            CheckpointError: A dtype cannot be stored.
        """
        rows = [[t.kind, t.fqn, name_of(info.dtype), info.shape] for t, info in self.items()]
        text = canonical(rows)
        # A load of what is saved with this table finds it by its text, and parses none.
        remember_table(text, self)
        return text

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of `text`. Raises CheckpointError as `text` does."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def same_as(self, other: Mapping[TensorId, TensorInfo]) -> bool:
        """Whether another table has the same tensors in the same order."""
        # As lists: a fragment names its tensor by the position.
        return self is other or list(self.items()) == list(other.items())

    def name(self, position: int) -> str:
        """`kind/fqn` of the tensor at a position, for messages."""
        return str(list(self)[position])


_by_text: WeakValueDictionary[str, TensorTable] = WeakValueDictionary()


def known_table(text: str) -> TensorTable | None:
    """The table of this process with this text, which all checkpoints of a run share; or None."""
    return _by_text.get(text)


def remember_table(text: str, table: TensorTable) -> None:
    """Let `known_table` find a table by its text, for as long as the table is referred to."""
    _by_text[text] = table


def numel(info: TensorInfo) -> int:
    """Elements of the whole tensor; 1 for a 0-d one."""
    return math.prod(info.shape)


def table_of(tensors: Mapping[TensorId, TensorInfo]) -> TensorTable:
    """A mapping as a table: itself, if it is one."""
    return tensors if isinstance(tensors, TensorTable) else TensorTable(tensors)


def canonical(record: object) -> str:
    """JSON in its one form: sorted keys, no spaces, ASCII."""
    return json.dumps(record, sort_keys=True, separators=(",", ":"))


# ---- the pieces of a rank ----


class Extents(NamedTuple):
    """The pieces of a rank as columns, each int64 [pieces]."""

    tensor: Ints
    """Position of the tensor in the table."""
    start: Ints
    """First element, in the flattened tensor."""
    length: Ints
    """Elements; may be 0."""
    itemsize: Ints
    """Bytes of an element."""
    memory: Ints
    """Address of the allocation that holds the data: a read may fill adjoining pieces of one
    allocation at once."""
    address: Ints
    """Address of the first byte."""


class Pieces(tuple[Piece, ...]):
    """Pieces whose columns are kept, for a rank that saves or loads the same pieces again."""

    columns: tuple[TensorTable, Extents] | None = None
    """The table of the last call of `extents`, and its result."""


def extents(pieces: Sequence[Piece], table: TensorTable) -> Extents:
    """Where each piece is in its tensor, and in memory.

    Raises:
        CheckpointError: A piece is of no known tensor, leaves its bounds, or is not a contiguous
            vector of the tensor's dtype.
    """
    if isinstance(pieces, Pieces) and pieces.columns is not None and pieces.columns[0] is table:
        return pieces.columns[1]
    tensor = _ints([table.index.get(piece.id, -1) for piece in pieces])
    start = _ints([piece.start for piece in pieces])
    length = _ints([piece.data.numel() for piece in pieces])
    # The index -1 of an unknown tensor selects the appended entry: -1 elements and no dtype, so no
    # piece of it is in bounds.
    in_bounds = (start >= 0) & (start + length <= np.append(table.numels, -1)[tensor])
    dtypes = [*(info.dtype for info in table.values()), None]
    is_vector = [
        data.dtype == dtypes[position] and data.dim() == 1 and data.is_contiguous()
        for (_, _, data), position in zip(pieces, tensor.tolist(), strict=True)
    ]
    good = in_bounds & np.array(is_vector, dtype=np.bool_)
    # Only the first one that is bad is looked at in detail.
    for bad in np.flatnonzero(~good)[:1].tolist():
        piece, info, data = pieces[bad], table.get(pieces[bad].id), pieces[bad].data
        if info is None:
            problem = "is not in the table of tensors"
        elif data.dtype != info.dtype:
            problem = f"is {data.dtype}, its tensor {info.dtype}"
        elif data.dim() != 1 or not data.is_contiguous():
            problem = f"has shape {tuple(data.shape)}, strides {data.stride()}; flatten it first"
        else:
            problem = f"leaves the {numel(info)} elements of its tensor"
        where = describe(piece.id, piece.start, data.numel())
        raise CheckpointError(f"piece {where} {problem}")
    itemsize = np.append(table.itemsizes, 0)[tensor]
    memory = _ints([piece.data.untyped_storage().data_ptr() for piece in pieces])
    address = _ints([piece.data.data_ptr() for piece in pieces])
    found = Extents(tensor, start, length, itemsize, memory, address)
    if isinstance(pieces, Pieces):
        pieces.columns = (table, found)
    return found


def _ints(numbers: Sequence[int]) -> Ints:
    return np.array(numbers, dtype=np.int64)


def describe(tensor: TensorId, start: int, length: int) -> str:
    """A run of elements as messages name it: `kind/fqn[start:end]`."""
    return f"{tensor}[{start}:{start + length}]"


# ---- many records at once ----


def grouped(items: Iterable[T], size_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Consecutive items in groups of at most `most` in all; a larger item is a group by itself."""
    group: list[T] = []
    filled = 0
    for item in items:
        size = size_of(item)
        if group and filled + size > most:
            yield group
            group, filled = [], 0
        group.append(item)
        filled += size
    if group:
        yield group


_collector_lock = threading.Lock()
_uncollected_threads = 0
_was_enabled = False


@contextmanager
def uncollected() -> Iterator[None]:
    """Switch the garbage collector off while records are made by the ten thousand.

    Any number of threads may be inside. Only computing belongs inside, never waiting: no thread of
    the process collects garbage meanwhile. The idea is that of Mercurial's `util.nogc`.
    """
    # The collector runs after every 700 new containers, and visits all of them now and then. A
    # table of 30,000 tensors triggers it a thousand times, in vain: half the time of a load.
    global _uncollected_threads, _was_enabled  # noqa: PLW0603  # a process has one collector
    with _collector_lock:
        if not _uncollected_threads:
            _was_enabled = gc.isenabled()
            gc.disable()
        _uncollected_threads += 1
    try:
        yield
    finally:
        with _collector_lock:
            _uncollected_threads -= 1
            # Only the last one, and only if it ran before: a script may have switched it off for
            # itself.
            if not _uncollected_threads and _was_enabled:
                gc.enable()
