"""What was wrong with a job, and from when to when: verdicts, saves that fail, etcd out of reach.

Pure functions. Times are wall clocks of nodes, in seconds since the epoch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zero_orchestrator.observe.events import Event
from zero_orchestrator.observe.history import Point
from zero_orchestrator.observe.status import JobStatus
from zero_orchestrator.observe.story import ENDS
from zero_orchestrator.observe.verdicts import STOPS, Kind

SAVES = "saves fail"
ETCD = "etcd away"
ASIDE = "set aside"
ENDINGS = frozenset({"finish", "fail", "give up", "halt"})
"""Events with which a job ends."""
_TRANSITIONS = ENDS | ENDINGS | {"activate"}
"""Each is a transaction of etcd, so that etcd answered."""
_OF_A_ROUND = frozenset(map(str, Kind))
"""What ends with its round at the latest."""


@dataclass(kw_only=True)
class PageProblem:
    """Something was wrong for some time."""

    kind: str
    """A kind of verdict, or `SAVES`, `ETCD` or `ASIDE`."""
    text: str
    from_s: float
    to_s: float | None = None
    """None: it holds now."""
    nodes: list[str] = field(default_factory=list)
    """The nodes that it is about."""
    steps: bool = True
    """Whether the job takes steps all the same."""


def withdraws(record: Mapping[str, Any]) -> bool:
    """Whether an event says that a problem is over."""
    return any(record.get(name) is False for name in ("slow", "stuck", "failed", "away", "aside"))


def problems(
    events: Sequence[Event], status: JobStatus, points: Sequence[Point], now_s: float
) -> list[PageProblem]:
    """All that is known, oldest first."""
    found: list[PageProblem] = []
    open_: dict[object, PageProblem] = {}
    for event in events:
        record, at_s = event.record, event.time_s
        kind = str(record.get("event"))
        for about in [about for about, one in open_.items() if _ends(one.kind, kind)]:
            open_.pop(about).to_s = at_s
        about, problem = _told(record, at_s, points)
        if problem is None:
            continue
        before = open_.pop(about, None)
        if withdraws(record):
            _end(found, before, problem, record, at_s)
            continue
        if before is not None and problem.kind in {SAVES, ETCD}:
            before.text = problem.text  # more nodes say so, or there is more to say
            before.nodes += [node for node in problem.nodes if node not in before.nodes]
            open_[about] = before
            continue
        if problem.kind == ETCD and _joins_an_outage(found, problem):
            continue
        if before is not None:
            before.to_s = at_s
        open_[about] = problem
        found.append(problem)
    return _closed(sorted(found, key=lambda one: one.from_s), status, points, now_s)


def _closed(
    found: list[PageProblem], status: JobStatus, points: Sequence[Point], now_s: float
) -> list[PageProblem]:
    """The problems with what is known apart from the events."""
    for one in found:
        ends_s = now_s if status.ended and one.to_s is None else one.to_s
        # By the clocks of two nodes it may end before it begins.
        one.to_s = None if ends_s is None else max(ends_s, one.from_s)
    if status.ended:
        return found
    # The event of a save that fails tells the first one; the record of the job has the last.
    for one in found:
        if status.failing_saves is not None and one.kind == SAVES and one.to_s is None:
            one.text = status.failing_saves.in_words(now_s)
    # The verdicts that hold now and whose events are not kept.
    told = {one.text for one in found}
    steps = [point.step for point in points]
    more = []
    for verdict in status.verdicts:
        if verdict.text in told:
            continue
        place = bisect_left(steps, verdict.since_step or 0)
        since_s = points[min(place, len(points) - 1)].time_s if points else 0.0
        more.append(
            PageProblem(
                kind=str(verdict.kind),
                text=verdict.text,
                from_s=since_s or status.state_time_s or 0.0,
                nodes=[verdict.node] if verdict.node else [],
                steps=verdict.kind not in STOPS,
            )
        )
    return [*found, *more]


def _end(
    found: list[PageProblem],
    before: PageProblem | None,
    told: PageProblem,
    record: Mapping[str, Any],
    at_s: float,
) -> None:
    """A problem is over, at the time of the event that tells it."""
    if before is not None:
        before.to_s = at_s
    elif "after_s" in record:
        # No agent can tell of an outage before etcd answers, and then says how long it was.
        outage = replace(told, from_s=at_s - float(record["after_s"]), to_s=at_s)
        if not _joins_an_outage(found, outage):
            found.append(outage)


def _joins_an_outage(found: Sequence[PageProblem], more: PageProblem) -> bool:
    """Whether an outage of etcd is one that another node has told of, which then has both nodes."""
    # Agents tell of an outage when etcd answers again, one after the other; of a long one, its
    # beginning is lost.
    for one in found:
        if one.kind != ETCD or one.to_s is None:
            continue
        if one.to_s >= more.from_s and (more.to_s is None or one.from_s <= more.to_s):
            one.from_s = min(one.from_s, more.from_s)
            one.nodes += [node for node in more.nodes if node not in one.nodes]
            return True
    return False


def _ends(kind: str, event: str) -> bool:
    """Whether an event ends all problems of a kind."""
    return event in _TRANSITIONS if kind == ETCD else kind in _OF_A_ROUND and event in ENDS


def _told(
    record: Mapping[str, Any], at_s: float, points: Sequence[Point]
) -> tuple[object, PageProblem | None]:
    """The subject of an event, and the problem of which it tells the beginning or the end."""
    event, text, node = record.get("event"), str(record.get("text", "")), str(record.get("node"))
    if event in tuple(Kind):
        nodes = [str(host) for host in record.get("hosts", [record.get("host")]) if host]
        stops = event in STOPS
        # A stop began with the last step.
        if stops:
            place = bisect_right(points, at_s, key=lambda point: point.time_s)
            at_s = points[place - 1].time_s if place else at_s
        about = (event, record.get("rank")) if event == Kind.STRAGGLER else event
        problem = PageProblem(kind=str(event), text=text, from_s=at_s, nodes=nodes, steps=not stops)
        return about, problem
    if event == "save" and "failed" in record:
        return SAVES, PageProblem(kind=SAVES, text=text, from_s=at_s)
    if event == "store" and "away" in record:
        return ETCD, PageProblem(kind=ETCD, text=text, from_s=at_s, nodes=[node])
    if event == "aside":
        return (ASIDE, node), PageProblem(kind=ASIDE, text=text, from_s=at_s, nodes=[node])
    return None, None
