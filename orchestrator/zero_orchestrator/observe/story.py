"""Parts of a job's story: the events of some time or node, and those of one recovery.

Pure functions of the events in their order. Times are of the wall clocks of nodes, so the length of
a span between two nodes is as exact as their clocks agree.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from zero_orchestrator.observe.events import Event

CAUSES = frozenset({"exit", "dead", "hang", "unkillable", "drain", "yield", "leave"})
"""Events with which the end of a round begins."""
ENDS = frozenset({"interrupt", "form"})
"""Events that end a round, so that another one forms."""
BEGINS = frozenset({"activate", "start", "worker", "restore"})
"""Events with which a round begins."""


def selected(
    events: Iterable[Event], *, since_s: float | None = None, node: str | None = None
) -> Iterator[Event]:
    """The events of a node, or of all, since a time (seconds since the epoch)."""
    for event in events:
        late = since_s is None or event.time_s >= since_s
        if late and node in (None, event.record.get("node")):
            yield event


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """From the first sign that a round ends to the start of the workers of the next one."""

    round: int
    """The round that ended."""
    events: tuple[Event, ...]

    @property
    def cause(self) -> str:
        """The kind of event with which the round ended, such as `exit`, `dead` or `hang`."""
        return str(self.events[0].record.get("event", ""))

    @property
    def detection_s(self) -> float | None:
        """From the last step to the transition that ended the round; None without the latter."""
        return None if self._end is None else max(0.0, self._end.time_s - self.from_s)

    @property
    def from_s(self) -> float:
        """When the round's last step has ended, or the first sign was; seconds since the epoch."""
        # With the last step: the work of one that is cut off is lost as well.
        first_s = self.events[0].time_s
        idle_s = self._end.record.get("idle_s") if self._end is not None else None
        if self._end is None or not isinstance(idle_s, int | float):
            return first_s  # no steps are reported, or it is of an older version
        last_step_s = self._end.time_s - idle_s
        is_failure = self._end.record.get("event") == "interrupt"
        # Without a failure they train until the transition, whatever was told before.
        return min(first_s, last_step_s) if is_failure else last_step_s

    @property
    def stepped(self) -> bool:
        """Whether a step of the round is known to have ended."""
        idle_s = self._end.record.get("idle_s") if self._end is not None else None
        return isinstance(idle_s, int | float)

    @property
    def _end(self) -> Event | None:
        return next((e for e in self.events if e.record.get("event") in ENDS), None)

    @property
    def took_s(self) -> float | None:
        """From the last step to the start of the next round's workers; None: not started yet."""
        begins = [e for e in self.events if e.record.get("event") in BEGINS]
        return max(0.0, begins[-1].time_s - self.from_s) if begins else None

    @property
    def offsets_s(self) -> tuple[float, ...]:
        """The time of each event since the first one; not negative, if clocks differ."""
        first_s = self.events[0].time_s
        return tuple(max(0.0, event.time_s - first_s) for event in self.events)


@dataclass(frozen=True, kw_only=True)
class Span:
    """A part of a recovery, or of a save."""

    name: str
    from_s: float
    """When it began, seconds since the epoch."""
    to_s: float
    note: str = ""
    """What it led to, in a sentence."""


def spans(found: Recovery, first_step_s: float) -> tuple[Span, ...]:
    """The parts of a recovery, without gaps, from the last step to the next round's first step."""
    last = {str(event.record.get("event")): event for event in found.events}
    at_s = {kind: event.time_s for kind, event in last.items()}
    note = {kind: str(event.record.get("text", "")) for kind, event in last.items()}
    if read_bytes := last["restore"].record.get("read_bytes") if "restore" in last else 0:
        note["restore"] += f"; rank 0 has read {read_bytes:,} bytes"
    end = max(ENDS & at_s.keys(), key=lambda kind: at_s[kind])
    marks = [("detection", at_s[end]), ("meeting", at_s.get("activate"))]
    if "restore" in last:
        # It is told at the end of the load, and says how long that took.
        load_s = last["restore"].record.get("load_s", 0.0)
        marks += [("starting", at_s["restore"] - load_s), ("loading", at_s["restore"])]
    else:
        # Nothing was loaded, or nobody has told of it.
        started = [at_s[kind] for kind in ("start", "worker") if kind in at_s]
        marks.append(("starting", max(started, default=None)))
    marks.append(("first step", first_step_s))
    parts: list[Span] = []
    from_s = found.from_s
    for name, to_s in marks:
        # A part whose events are not kept, as in a large job, belongs to the part after it.
        if to_s is not None:
            until_s = min(max(from_s, to_s), max(from_s, first_step_s))
            why = note.get({"detection": end, **_LEADS_TO}.get(name, ""), "")
            parts.append(Span(name=name, from_s=from_s, to_s=until_s, note=why))
            from_s = until_s
    return tuple(parts)


_LEADS_TO: Mapping[str, str] = MappingProxyType({"meeting": "activate", "loading": "restore"})
"""A part of a recovery -> the event at its end."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """Time without a step: a recovery, or several that ended in the next failure."""

    recoveries: tuple[Recovery, ...]
    """Oldest first."""
    from_s: float
    """The last step before the first of them, seconds since the epoch."""
    to_s: float
    """The first step after the last of them, or the end of what is known."""
    over: bool
    """Whether a step has ended it."""


def bands(found: Sequence[Recovery], steps_s: Sequence[float], end_s: float) -> tuple[Band, ...]:
    """The time that recoveries took: no two bands overlap, and nothing is in two of them."""
    made: list[Band] = []
    for place, one in enumerate(found):
        # The first step after its last event ends a recovery.
        at = bisect_left(steps_s, one.events[-1].time_s)
        step_s = steps_s[at] if at < len(steps_s) else math.inf
        if place + 1 < len(found) and found[place + 1].stepped:
            # A step was taken before the next recovery, at the latest where that begins.
            step_s = min(step_s, found[place + 1].from_s)
        over = step_s <= end_s
        band = Band(
            recoveries=(one,),
            from_s=one.from_s,
            to_s=max(min(step_s, end_s), one.from_s),
            over=over,
        )
        # A recovery lasts until a step ends after it. Without one, the next failure is part of it.
        while made and (band.from_s < made[-1].to_s or not made[-1].over):
            before = made.pop()
            band = Band(
                recoveries=(*before.recoveries, *band.recoveries),
                from_s=min(before.from_s, band.from_s),
                to_s=max(before.to_s, band.to_s),
                over=band.over,
            )
        made.append(band)
    return tuple(made)


def phases(band: Band) -> tuple[Span, ...]:
    """The parts of time without a step: without gaps, and together as long as it."""
    found: list[Span] = []
    at_s = band.from_s
    ends_s = [*(one.from_s for one in band.recoveries[1:]), band.to_s]
    for place, (one, end_s) in enumerate(zip(band.recoveries, ends_s, strict=True), start=1):
        *parts, last = spans(one, end_s)
        # The last part leads to a first step only if there has been one.
        if place < len(ends_s):
            last = replace(last, name="until the next failure")
        elif not band.over:
            last = replace(last, name="no step yet")
        for part in (*parts, last):
            to_s = band.to_s if part is last and place == len(ends_s) else part.to_s
            to_s = min(max(at_s, to_s), band.to_s)
            found.append(replace(part, from_s=at_s, to_s=to_s))
            at_s = to_s
    return tuple(found)


def recoveries(events: Sequence[Event]) -> tuple[Recovery, ...]:
    """Every recovery among the events, oldest first; the last one may not have ended yet."""
    ends = [i for i, event in enumerate(events) if event.record.get("event") in ENDS]
    # What lies between two ends of rounds is part of one recovery at most.
    bounds = [*ends, len(events)]
    return tuple(
        _recovery(events, end, bounds[number - 1] if number else 0, bounds[number + 1])
        for number, end in enumerate(ends)
    )


def _recovery(events: Sequence[Event], end: int, before: int, after: int) -> Recovery:
    """The recovery with the end of a round at `end`, between the ends of two other rounds."""
    of_round = events[end].record.get("round", 0)

    def within(places: range, kinds: frozenset[str], number: int) -> list[int]:
        found = ((i, events[i].record) for i in places)
        return [i for i, r in found if r.get("round") == number and r.get("event") in kinds]

    first = min(within(range(before, end), CAUSES, of_round), default=end)
    last = max(within(range(end, after), BEGINS, of_round + 1), default=after - 1)
    return Recovery(round=of_round, events=tuple(events[first : last + 1]))
