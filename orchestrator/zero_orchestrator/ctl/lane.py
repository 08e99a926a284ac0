"""The lane of a node: what the node did, from when to when, bounded however long the job runs.

A lane is made of the marks of the goodput ledger, and is written with it. The ledger says how much
time each use took; the lane says when. `Lane` is a value, and its methods are pure functions.

Times are of the node's wall clock, in seconds since the epoch: for people only. Must always hold: a
lane has at most `SPANS` spans; they do not overlap, and are in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from zero_orchestrator.ctl.goodput import Begins, Doing, Mark

SPANS = 64
"""Most spans of a lane; beyond them a short one becomes part of the span before it."""
SAVE_S = 0.05
"""A save that blocks training for less time is not shown: it is in the ledger."""


class Phase(StrEnum):
    """What a node does in a span."""

    TRAINING = "training"
    REPEATING = "repeating"
    SAVING = "saving"
    RECOVERING = "recovering"
    WAITING = "waiting"
    STARTING = "starting"
    IDLE = "idle"
    GONE = "gone"


_PHASES: Mapping[Doing, Phase] = MappingProxyType(
    {
        Doing.STARTING: Phase.STARTING,
        Doing.WAITING: Phase.WAITING,
        Doing.FORMING: Phase.RECOVERING,
        Doing.RUNNING: Phase.RECOVERING,  # until the first step of the round
        Doing.IDLE: Phase.IDLE,
        Doing.ENDING: Phase.STARTING,
    }
)


@dataclass(frozen=True, kw_only=True)
class Span:
    """A node does this from now on."""

    from_s: float
    phase: Phase


@dataclass(frozen=True, kw_only=True)
class Lane:
    """The spans of a node; each ends where the next one begins, the last one at `until_s`."""

    spans: tuple[Span, ...] = ()
    until_s: float
    ran_s: float | None = None
    """When workers began to run; None without workers, and from their first step on."""
    stepped: bool = False
    """Whether a step has ended in any round of this node."""
    reached: int = 0
    """The last step that any worker of the job is known to have finished."""

    def add(self, mark: Mark, at_s: float) -> Lane:
        """The lane after one more mark of the ledger, at a time of the wall clock."""
        at_s = max(at_s, self.until_s)
        if isinstance(mark, Begins):
            now = self.shown(at_s, reports=mark.reports)
            phase = _PHASES[mark.doing]
            if phase is Phase.RECOVERING and not self.stepped:
                phase = Phase.STARTING
            ran_s = at_s if mark.doing is Doing.RUNNING else None
            reached = max(self.reached, mark.reached)
            return replace(now.begin(phase, at_s), ran_s=ran_s, reached=reached)
        now, saving_s = self, min(mark.saving_ns / 1e9, at_s - self._last_s)
        if saving_s >= SAVE_S:
            now = now.begin(Phase.SAVING, at_s - saving_s)
        phase = Phase.TRAINING if mark.step >= self.reached else Phase.REPEATING
        reached = max(self.reached, mark.step)
        return replace(now.begin(phase, at_s), ran_s=None, stepped=True, reached=reached)

    def shown(self, at_s: float, *, reports: bool) -> Lane:
        """The lane up to now. Workers that do not report their steps train as long as they run."""
        now = replace(self, until_s=max(at_s, self.until_s))
        if reports or self.ran_s is None:
            return now
        return now.begin(Phase.TRAINING, self.ran_s)

    def begin(self, phase: Phase, at_s: float) -> Lane:
        """The lane with a new span, unless the node does that already."""
        now = replace(self, until_s=max(at_s, self.until_s))
        if self.spans and self.spans[-1].phase is phase:
            return now
        return replace(now, spans=_bounded((*self.spans, Span(from_s=at_s, phase=phase))))

    def after(self, before: Lane | None) -> Lane:
        """This lane after that of the node's agents before: between them the node was gone."""
        if before is None:
            return self
        gone = Span(from_s=before.until_s, phase=Phase.GONE)
        mine = tuple(s for s in self.spans if s.from_s > before.until_s)
        return replace(self, spans=_bounded((*before.spans, gone, *mine)))

    @property
    def _last_s(self) -> float:
        return self.spans[-1].from_s if self.spans else self.until_s


def _bounded(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """At most `SPANS` spans: the shortest save goes first, then the shortest of all others."""
    while len(spans) > SPANS:
        lengths_s = [b.from_s - a.from_s for a, b in pairwise(spans[1:])]
        _, _, least = min(
            (spans[place].phase is not Phase.SAVING, length_s, place)
            for place, length_s in enumerate(lengths_s, start=1)
        )
        spans = _joined((*spans[:least], *spans[least + 1 :]))
    return spans


def _joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Two spans in a row of the same phase are one."""
    pairs = zip((None, *spans), spans, strict=False)
    return tuple(span for last, span in pairs if last is None or last.phase is not span.phase)


def to_record(lane: Lane) -> dict[str, Any]:
    """The lane as JSON."""
    spans = [[round(span.from_s, 2), str(span.phase)] for span in lane.spans]
    return {"spans": spans, "until_s": round(lane.until_s, 2)}


def from_record(record: Mapping[str, Any]) -> Lane:
    """The lane in a record; a phase that this version does not know is IDLE.

    Raises:
        KeyError: The record lacks a field.
        ValueError: A field has another kind of value.
        TypeError: As ValueError.
    """
    known = {str(phase): phase for phase in Phase}
    spans = (
        Span(from_s=float(at_s), phase=known.get(name, Phase.IDLE))
        for at_s, name in record["spans"]
    )
    return Lane(spans=tuple(spans), until_s=float(record["until_s"]))
