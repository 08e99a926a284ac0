"""Which collective does not match: the flight recorders of torch on all ranks, compared.

Pure. Torch numbers the collectives of each process group. The ranks of a group must issue the same
ones under the same numbers: else those that have issued wait for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

_EQUAL_SIZES = frozenset({"all_reduce", "broadcast", "_all_gather_base", "_reduce_scatter_base"})
"""Collectives whose inputs have the same sizes on all ranks."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective that a rank has issued."""

    group: str
    number: int
    """Its number among those of the group."""
    name: str
    sizes: str
    """The sizes of its inputs."""
    at: str = ""
    """The function and line of the script that has issued it; empty: not known."""
    ended: bool = False

    @property
    def kind(self) -> tuple[str, str]:
        """The part that must be the same on all ranks."""
        return self.name, self.sizes if self.name in _EQUAL_SIZES else ""

    @property
    def text(self) -> str:
        """The collective in words."""
        where = f", from {self.at}" if self.at else ""
        return f"{self.name} of {self.sizes}{where}"


def from_answer(records: Iterable[Mapping[str, Any]]) -> tuple[Collective, ...]:
    """The collectives in a worker's answer; without those that cannot be read."""
    names = [field.name for field in fields(Collective)]
    return tuple(
        Collective(**{name: record[name] for name in names})
        for record in records
        if record.keys() >= set(names)
    )


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """A collective that does not match."""

    odd: Mapping[int, Collective | None]
    """By rank that is unlike the others, what it has issued; None: nothing, under this number."""
    usual: Collective
    """What the others have issued."""
    others: int
    """The number of the others."""


def compare(ranks: Mapping[int, Sequence[Collective]]) -> Mismatch | None:
    """The first collective that does not match; None if all do, as far as they are known."""
    for group in sorted({one.group for issued in ranks.values() for one in issued}):
        by_rank = {
            rank: own
            for rank, issued in ranks.items()
            if (own := {one.number: one for one in issued if one.group == group})
        }
        if len(by_rank) < 2:
            continue
        # Only the last few of each rank are recorded: before this one some rank knows nothing.
        first = max(min(issued) for issued in by_rank.values())
        # Some of torch's exchanges take numbers and are not recorded, such as a monitored barrier.
        numbers = {number for issued in by_rank.values() for number in issued if number >= first}
        for number in sorted(numbers):
            under = {rank: issued.get(number) for rank, issued in by_rank.items()}
            there = [one for one in under.values() if one is not None]
            usual = Counter(one.kind for one in there).most_common(1)[0][0]
            same = [one for one in there if one.kind == usual]
            odd = {r: one for r, one in under.items() if one is None or one.kind != usual}
            # A rank that has not issued it is late, and nothing else, if the others did not wait.
            if odd and (len(same) < len(there) or not all(one.ended for one in same)):
                return Mismatch(odd=odd, usual=same[0], others=len(same))
    return None
