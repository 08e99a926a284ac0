"""The order in which units are all-gathered, and the position of a pass in that order.

Owns the order as data, without any communication. Must always hold: every rank gathers every unit
of the order, in that order, in every pass. A rank whose branch leaves a module out takes part in
its gather all the same, and so ranks may take different branches. At first the order is that of the
modules; after the first step it is the one in which they really ran, if all ranks agree.

Source of the idea: DeepSpeed's trace of the first step, which a different branch invalidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice


class Pass:
    """One pass, forward or backward, by the numbers of the units."""

    def __init__(self, order: Sequence[int] = ()) -> None:
        self._order = tuple(order)
        self._next = 0

    def seek(self, unit: int) -> tuple[int, ...]:
        """Advance to a unit that is needed now; returns the units to gather before it, unused.

        A unit that the order does not have any more is needed out of order: nothing comes before
        it, and the gather ends only if all ranks need it.
        """
        if unit not in self._order[self._next :]:
            return ()
        place = self._order.index(unit, self._next)
        skipped = self._order[self._next : place]
        self._next = place + 1
        return skipped

    def coming(self) -> Iterator[int]:
        """The units that come next."""
        return iter(self._order[self._next :])

    def end(self) -> tuple[int, ...]:
        """The units that the pass has left out at its end."""
        rest, self._next = self._order[self._next :], len(self._order)
        return rest


def complete(trace: Sequence[int], default: Sequence[int]) -> tuple[int, ...]:
    """A trace with the units that it lacks, each after its predecessor in the default order.

    In the trace, the order in which they were needed, a unit may occur several times.
    """
    order = list(trace)
    for place, unit in enumerate(default):
        if unit not in order:
            order.insert(order.index(default[place - 1]) + 1 if place else 0, unit)
    return tuple(order)


def ahead(coming: Iterator[int], sizes: Sequence[int], budget: int | None) -> list[int]:
    """Prefetch: the coming units to begin to gather before they are needed.

    Their sizes together are at most the budget, in elements; None: one unit of any size.
    """
    if budget is None:
        return list(islice(coming, 1))
    found: list[int] = []
    for unit in coming:
        budget -= sizes[unit]
        if budget < 0:
            break
        found.append(unit)
    return found
