"""The tensors of a checkpoint, all at once: their order, their sizes, their JSON.

A model may have tens of thousands of tensors, and a save or a load asks the same of each of them
several times; what is asked of all of them is computed once, in NumPy where it is numbers.

Must always hold: nothing changes a table after it was made.

Called wherever tensors are meant by their position: `publish`, `parse`, `extents`, `reader`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from functools import cached_property
from weakref import WeakValueDictionary

import numpy as np

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.format.dtypes import name_of
from zero_checkpoint.format.fragments import Ints
from zero_checkpoint.format.pieces import TensorId, TensorInfo


class TensorTable(dict[TensorId, TensorInfo]):
    """Every tensor, in the order in which fragments mean them."""

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
        """All kinds that there are."""
        return frozenset(tensor.kind for tensor in self)

    @cached_property
    def kinds(self) -> Ints:
        """[tensors], the kind of each: 0 for that of the first tensor, and so on.

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
        """As JSON: [kind, fqn, dtype, shape] of each.

        Raises:
            CheckpointError: A dtype cannot be stored.
        """
        rows = [[t.kind, t.fqn, name_of(info.dtype), info.shape] for t, info in self.items()]
        text = canonical(rows)
        remember_table(text, self)
        return text

    @cached_property
    def digest(self) -> str:
        """Of `text`. Raises as that does."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def same_as(self, other: Mapping[TensorId, TensorInfo]) -> bool:
        """Whether another has the same tensors in the same order."""
        return self is other or list(self.items()) == list(other.items())

    def name(self, position: int) -> str:
        """`kind/fqn` of the tensor at a position, for messages."""
        tensor = list(self)[position]
        return f"{tensor.kind}/{tensor.fqn}"


_by_text: WeakValueDictionary[str, TensorTable] = WeakValueDictionary()


def known_table(text: str) -> TensorTable | None:
    """The table of this process that has this text, if there is one: it is that of all of a run."""
    return _by_text.get(text)


def remember_table(text: str, table: TensorTable) -> None:
    """A table has this text; it is known for as long as somebody has it."""
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
