"""The order in which a rank begins exchanges, as a number that all ranks compare.

NCCL matches the exchanges of a communicator by their order alone. If the orders of two ranks
differ, what has the same size is mixed up without an error. Must always hold: orders are compared
after every exchange of a step has been begun, and before a weight changes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

_BITS = 24
"""Of a checksum: it travels as an fp32."""
_KEPT = 4096
"""Names of exchanges that are remembered for a message."""


class Lane:
    """The exchanges of one communicator since the last comparison."""

    def __init__(self) -> None:
        self.checksum = 0
        self.names: list[str] = []

    def note(self, what: str) -> None:
        """An exchange of this name begins."""
        self.checksum = zlib.crc32(what.encode(), self.checksum)
        if len(self.names) < _KEPT:
            self.names.append(what)

    def clear(self) -> None:
        """Begin anew, after a comparison."""
        self.checksum = 0
        self.names.clear()


class IssueOrder:
    """The orders of the communicators of one rank, in which the ranks must agree."""

    def __init__(self) -> None:
        self._lanes: list[Lane] = []

    def lane(self) -> Lane:
        """Another communicator; all ranks add theirs in the same order."""
        self._lanes.append(Lane())
        return self._lanes[-1]

    def checksum(self) -> float:
        """Of all communicators since the last comparison; exact in fp32."""
        joined = " ".join(str(lane.checksum) for lane in self._lanes)
        return float(zlib.crc32(joined.encode()) & ((1 << _BITS) - 1))

    def names(self) -> list[list[str]]:
        """By communicator, what was begun since the last comparison."""
        return [list(lane.names) for lane in self._lanes]

    def clear(self) -> None:
        """Begin anew, after a comparison."""
        for lane in self._lanes:
            lane.clear()


def difference(by_rank: Sequence[Sequence[Sequence[str]]]) -> str:
    """Where the orders of the ranks first differ, in words.

    `by_rank` has `IssueOrder.names` of each.
    """
    first = by_rank[0]
    for rank, lanes in enumerate(by_rank):
        for mine, theirs in zip(first, lanes, strict=True):
            place = next(
                (n for n, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]),
                min(len(mine), len(theirs)),
            )
            if place < max(len(mine), len(theirs)):
                return (
                    f"as exchange {place + 1} of the step rank 0 began {_at(mine, place)} and "
                    f"rank {rank} {_at(theirs, place)}"
                )
    return "the exchanges differ further on than is remembered"


def _at(names: Sequence[str], place: int) -> str:
    return names[place] if place < len(names) else "nothing"
