"""Every recovery of a job over all nodes, in the trace event format: for ui.perfetto.dev.

`trace` is a pure function of the events. Its file has a process for the job, with the phases that
the report shows, and one for each node: a thread for its agent, and one for each of its ranks. What
an agent does is known from `start`, and what its workers do from `first step`. All events of a
recovery are there as instants, in whole microseconds since the epoch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from zero_orchestrator.observe.events import Event, number
from zero_orchestrator.observe.story import ENDS, Band, Recovery, phases

Json = dict[str, Any]

_JOB, _AGENT = "", "agent"
"""No node has an empty name."""


def trace(events: Sequence[Event], lost: Sequence[Band]) -> Json:
    """The file, as JSON: the recoveries among the events of a job."""
    file = _File()
    recoveries = file.thread(_JOB, "recoveries")
    for band in lost:
        first = band.recoveries[0]
        rounds = [one.round for one in band.recoveries]
        file.slice(recoveries, f"recovery: {first.cause}", band.from_s, band.to_s, rounds=rounds)
        for part in phases(band):
            file.slice(recoveries, part.name, part.from_s, part.to_s, note=part.note)
        for one in band.recoveries:
            of_next = [e.record for e in events if e.record.get("round") == one.round + 1]
            _add_nodes(file, one, of_next)
    return {"traceEvents": file.events, "displayTimeUnit": "ms"}


def _add_nodes(file: _File, one: Recovery, of_next: Sequence[Mapping[str, Any]]) -> None:
    """Add the doings of each node in a recovery, given the events of the round after it."""
    # Each node tells of its own start; the round begins with the transition of one of them.
    begins = next((record for record in of_next if record.get("event") == "activate"), {})
    starts, firsts = (
        {str(record.get("node")): record for record in of_next if record.get("event") == kind}
        for kind in ("start", "first step")
    )
    shifts_s = {node: shift_s(begins, start) for node, start in starts.items()}
    end_s = max(_time_s(e.record) for e in one.events if e.record.get("event") in ENDS)
    for place, event in enumerate(one.events):
        record, node = event.record, str(event.record.get("node", "?"))
        at_s = _time_s(record) + shifts_s.get(node, 0.0)
        file.instant(file.thread(node, _AGENT), record, at_s, scope="t" if place else "g")
    for node, start in starts.items():
        start_s = _time_s(start) + shifts_s[node]
        if (stopped_s := number(start.get("stopped_s"))) is not None:
            # Its workers may have ended before the round did.
            stopped_s = max(end_s, stopped_s + shifts_s[node])
            agent = file.thread(node, _AGENT)
            file.next_slice(agent, "stopping the workers", end_s, stopped_s)
            file.next_slice(agent, "forming the round", stopped_s, start_s)
        for rank, way in _ways(firsts.get(node, {})).items():
            at_s = start_s
            for what, took_s in way:
                file.next_slice(file.thread(node, f"rank {rank}"), what, at_s, at_s + took_s)
                at_s += took_s


def shift_s(begins: Mapping[str, Any], start: Mapping[str, Any]) -> float:
    """The shift of a node's times, given the beginning of a round and its start there."""
    if not begins or begins.get("node") == start.get("node"):
        return 0.0
    begins_s, stopped_s = _time_s(begins), number(start.get("stopped_s"))
    # Clocks of nodes differ, but a node stops the workers of the round before ahead of the
    # beginning, and starts those of this one after it: the least shift with which that holds.
    most_s = 0.0 if stopped_s is None else min(0.0, begins_s - stopped_s)
    return max(begins_s - _time_s(start), most_s)


def _ways(first: Mapping[str, Any]) -> dict[int, list[tuple[str, float]]]:
    """By rank, what it did before its first step; empty if that is unknown, or not understood."""
    try:
        kind = dict[int, list[tuple[str, float]]]
        return msgspec.convert(first.get("ranks", {}), kind, strict=False)
    except (msgspec.ValidationError, UnicodeEncodeError):
        return {}


def _time_s(record: Mapping[str, Any]) -> float:
    return number(record.get("time")) or 0.0


_Thread = tuple[int, int]


class _File:
    """The events of a file."""

    def __init__(self) -> None:
        self.events: list[Json] = []
        self._threads: dict[tuple[str, str], _Thread] = {}
        self._ends_us: dict[_Thread, int] = {}

    def thread(self, node: str, name: str) -> _Thread:
        """A thread of the process of a node, or of the job."""
        if (node, name) not in self._threads:
            # In the format a node is a process; its number is the order of appearance.
            pids = {of: pid for (of, _), (pid, _) in self._threads.items()}
            pid, tid = pids.get(node, len(pids)), len(self._threads)
            self._threads[node, name] = pid, tid
            self._add("M", (pid, tid), "process_name", args={"name": node or "job"})
            self._add("M", (pid, tid), "thread_name", args={"name": name})
        return self._threads[node, name]

    def slice(self, thread: _Thread, name: str, from_s: float, to_s: float, **args: Any) -> None:
        """Something that lasts."""
        at_us = _us(from_s)
        self._add("X", thread, name, ts=at_us, dur=max(0, _us(to_s) - at_us), args=args)

    def next_slice(self, thread: _Thread, name: str, from_s: float, to_s: float) -> None:
        """Something that lasts, of which a thread does one after the other."""
        # Viewers drop slices of one thread that overlap.
        at_us, end_us = max(_us(from_s), self._ends_us.get(thread, 0)), _us(to_s)
        if end_us > at_us:
            self._ends_us[thread] = end_us
            self._add("X", thread, name, ts=at_us, dur=end_us - at_us, args={})

    def instant(self, thread: _Thread, record: Mapping[str, Any], at_s: float, scope: str) -> None:
        """An event; its scope is the file ("g") or the thread ("t")."""
        args = {fact: value for fact, value in record.items() if fact not in ("time", "event")}
        name = str(record.get("event", "?"))
        self._add("i", thread, name, ts=_us(at_s), s=scope, args=args)

    def _add(self, kind: str, thread: _Thread, name: str, **more: Any) -> None:
        pid, tid = thread
        self.events.append({"ph": kind, "pid": pid, "tid": tid, "name": name, **more})


def _us(at_s: float) -> int:
    # What a worker has measured is any float, and NaN and infinity are no integers.
    at_us = 1e6 * at_s
    return round(at_us) if math.isfinite(at_us) else 0
