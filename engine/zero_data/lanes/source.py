"""The interface between lanes and what they read: a `Source` opens a `Reader` for each lane.

A lane is a virtual reader: it runs the user's whole pipeline (files, shuffling, filters, mixtures,
packing, tokenizing) with (lane, lanes) in the place of (rank, world). Must always hold: the samples
of a lane in an epoch, and their order, depend on (lane, lanes, epoch) alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol


class Reader(Protocol):
    """The samples of one lane in one epoch, in order."""

    def __iter__(self) -> Iterator[Any]:
        """Itself."""

    def __next__(self) -> Any:
        """The next sample; raises StopIteration at the end of the lane's epoch."""

    def state(self) -> dict[str, Any] | None:
        """Where it is, after the samples that it has returned.

        Of numbers, text, tensors, and tuples, lists and dictionaries of them. None: it cannot say
        here, and is found again by reading from the last state, or from the beginning.
        """


class Source(Protocol):
    """Data that lanes read. It can be pickled, if processes read."""

    def open(self, lane: int, lanes: int, epoch: int, state: dict[str, Any] | None) -> Reader:
        """The lane's samples of an epoch: from its beginning, or from a `state` of it on."""
