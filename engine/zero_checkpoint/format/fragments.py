"""Which bytes of which file hold which elements of which tensor: five columns of integers.

A fragment is a non-empty run of elements of one flattened tensor, stored as one run of bytes of one
file. The columns are NumPy arrays, because a large job has hundreds of thousands of fragments and
each rank searches all of them. Rows are sorted by (tensor, start).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Fragments:
    """The columns, each int64 [fragments]."""

    tensor: Ints
    """Index of the tensor in the manifest's table."""
    file: Ints
    """Index of the file; equal to the rank that wrote it."""
    start: Ints
    """First element, in the flattened tensor."""
    length: Ints
    """Elements, at least 1."""
    offset: Ints
    """First byte, counted from the start of the file."""

    def __len__(self) -> int:
        """The number of fragments."""
        return len(self.tensor)

    @property
    def end(self) -> Ints:
        """One past the last element."""
        return self.start + self.length

    def take(self, rows: npt.NDArray[Any]) -> Fragments:
        """The rows at these indices, in this order."""
        return Fragments(**{name: getattr(self, name)[rows] for name in COLUMNS})


@dataclass(frozen=True, slots=True)
class Break:
    """A group is covered up to `covered`; its next run begins, or the group ends, at `next_at`."""

    group: int
    covered: int
    next_at: int


COLUMNS = tuple(f.name for f in fields(Fragments))


def from_lists(columns: Mapping[str, Sequence[int] | Ints]) -> Fragments:
    """Fragments from columns of equal length, sorted by (tensor, start)."""
    loose = Fragments(**{name: np.array(columns[name], dtype=np.int64) for name in COLUMNS})
    return loose.take(np.lexsort((loose.start, loose.tensor)))


def run_lengths(follows: npt.NDArray[np.bool_], length: Ints) -> tuple[Ints, Ints]:
    """The first row of each run of rows, and the total length of each run.

    `follows` [rows - 1]: whether each row after the first begins where the row before it ends; no
    `length` [rows] is 0.
    """
    # The first row begins a run, if there is one at all.
    heads = np.flatnonzero(np.append(True, ~follows)[: len(length)])
    return heads, np.add.reduceat(length, heads) if len(heads) else length


def first_break(group: Ints, begin: Ints, end: Ints, low: Ints, high: Ints) -> Break | None:
    """The first position at which runs do not tile [low, high) of a group exactly once; or None.

    Of each run [runs] the group, the first position, and one past its last; sorted by the first
    two. Of each group [groups] its bounds.
    """
    # A run begins where the run before it in its group ends, the first one at `low`.
    expected = low[group]
    follows = np.flatnonzero(group[1:] == group[:-1]) + 1
    expected[follows] = end[follows - 1]
    for run in np.flatnonzero(begin != expected)[:1].tolist():
        return Break(int(group[run]), int(expected[run]), int(begin[run]))
    reached = low.copy()
    reached[group] = end  # of equal indices the last assignment stays: the group's last run
    for short in np.flatnonzero(reached != high)[:1].tolist():
        return Break(short, int(reached[short]), int(high[short]))
    return None


def check_cover(
    fragments: Fragments, numels: Sequence[int] | Ints, name: Callable[[int], str]
) -> str | None:
    """Why the fragments do not cover every tensor exactly once, or None if they do.

    They are sorted by (tensor, start); `name` is what the sentence calls a tensor.
    """
    high = np.asarray(numels, dtype=np.int64)
    found = first_break(fragments.tensor, fragments.start, fragments.end, np.zeros_like(high), high)
    if found is None:
        return None
    if found.next_at > found.covered:
        return f"{name(found.group)}[{found.covered}:{found.next_at}] is in no file"
    # One place alone: what overlaps is no other fragment, but lies beyond the tensor.
    holders = fragments.file[
        (fragments.tensor == found.group)
        & (fragments.start <= found.next_at)
        & (fragments.end > found.next_at)
    ]
    overlap = f"{name(found.group)}[{found.next_at}:{found.covered}]"
    if len(holders) < 2:
        return f"{overlap} is beyond the end of the tensor"
    return f"{overlap} is in more than one place: files {holders.tolist()}"
