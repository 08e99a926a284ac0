"""In which order units are gathered, and where a pass through the model is in it.

Owns the order as data; nothing here travels. Must always hold: every rank gathers every unit of
the order, in that order, in every pass. A rank whose branch leaves a module out takes part in
its gather all the same, and so ranks may take different branches. At first the order is that of
the modules; after the first step it is the one in which they really ran, if all ranks agree.

Called by `param_coordinator`.

Source of the idea: DeepSpeed's trace of the first step, which a different branch invalidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Pass:
    """One pass, forward or backward, by the numbers of the units."""

    def __init__(self, order: Sequence[int] = ()) -> None:
        self._order = tuple(order)
        self._next = 0

    def seek(self, unit: int) -> tuple[int, ...]:
        """Go on to a unit that is needed now; the units to gather before it, unused.

        One that does not come any more is needed out of order: nothing is before it, and the
        ranks can but hope that all of them need it.
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
    """A trace and the units that it lacks, each behind the one that precedes it by default.

    Args:
        trace: The units in the order in which they were needed; some perhaps several times.
        default: All units, once each.
    """
    order = list(trace)
    for place, unit in enumerate(default):
        if unit not in order:
            order.insert(order.index(default[place - 1]) + 1 if place else 0, unit)
    return tuple(order)


def ahead(coming: Iterator[int], sizes: Sequence[int], budget: int | None, room: int) -> list[int]:
    """Which of the coming units to begin to gather before they are needed.

    Args:
        coming: The units that come next.
        sizes: Of every unit, in elements.
        budget: In elements, for all of them together; None: one unit, whatever its size.
        room: How many elements may become live.
    """
    found: list[int] = []
    left = room if budget is None else min(budget, room)
    for unit in coming:
        left -= sizes[unit]
        if left < 0 or (budget is None and found):
            break
        found.append(unit)
    return found
