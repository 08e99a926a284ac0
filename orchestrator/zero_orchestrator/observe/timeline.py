"""The timeline of a node: what the node did, from when to when, bounded however long the job runs.

A timeline is made of the marks of the goodput ledger, and is written with it. The ledger says how
much time each use took; the timeline says when. `Timeline` is a value, and its methods are pure
functions. Times are of the node's wall clock, in seconds since the epoch: for people only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from zero_orchestrator.observe.goodput import Begins, Doing, Mark
from zero_orchestrator.observe.pace import stalls

SPANS = 64
"""Most spans of a timeline; beyond them a short one becomes part of the span before it."""
SAVE_S = 0.05
"""A save that blocks training for less time is not shown: it is in the ledger."""


class Phase(StrEnum):
    """What a node does in a span."""

    TRAINING = "training"
    REPEATING = "repeating"
    SAVING = "saving"
    STUCK = "stuck"
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
class Timeline:
    """The spans of a node; each ends where the next one begins, the last one at `until_s`."""

    spans: tuple[Span, ...] = ()
    until_s: float
    ran_s: float | None = None
    """When workers began to run; None without workers, and from their first step on."""
    stepped: bool = False
    """Whether a step has ended in any round of this node."""
    reached: int = 0
    """The last step that any worker of the job is known to have finished."""
    step: int | None = None
    """The last step of this round; None before the first."""
    step_s: float = 0.0
    """When that has ended; later by the time of the saves since then."""
    usual_s: float = 0.0
    """The usual time of a long step of this round; 0: not known."""

    def add(self, mark: Mark, at_s: float) -> Timeline:
        """The timeline after one more mark of the ledger, at a time of the wall clock."""
        at_s = max(at_s, self.until_s)
        if isinstance(mark, Begins):
            now = self.shown(at_s, reports=mark.reports)
            phase = _PHASES[mark.doing]
            if phase is Phase.RECOVERING and not self.stepped:
                phase = Phase.STARTING
            ran_s = at_s if mark.doing is Doing.RUNNING else None
            reached = max(self.reached, mark.reached)
            begun = now.begin(phase, at_s)
            return replace(begun, ran_s=ran_s, reached=reached, step=None, usual_s=0.0)
        # Not before the present span, or the spans would be out of order.
        last_s = self.spans[-1].from_s if self.spans else self.until_s
        usual_s, saving_s = mark.usual_ns / 1e9, min(mark.saving_ns / 1e9, at_s - last_s)
        now = replace(self, usual_s=usual_s)._stalled(at_s - saving_s)
        if saving_s >= SAVE_S:
            now = now._saves(at_s - saving_s)
        # A step is reported again with its saves: the last one anew is no repetition.
        phase = Phase.TRAINING if mark.step >= self.reached else Phase.REPEATING
        reached = max(self.reached, mark.step)
        step_s = self.step_s + saving_s if mark.step == self.step else at_s
        now = replace(now.begin(phase, at_s), ran_s=None, stepped=True, reached=reached)
        return replace(now, step=mark.step, step_s=step_s)

    def _saves(self, from_s: float) -> Timeline:
        """The timeline with a save that blocks, or with more of the one that has just ended."""
        if len(self.spans) > 1:
            *before, last = self.spans
            if before[-1].phase is Phase.SAVING and last.from_s > from_s - SAVE_S:
                return replace(self, spans=tuple(before))
        return self.begin(Phase.SAVING, from_s)

    def _stalled(self, at_s: float) -> Timeline:
        """With the part of the present step that is above the usual time of a long one."""
        if self.step is None or not self.usual_s or not stalls(at_s - self.step_s, self.usual_s):
            return self
        return self.begin(Phase.STUCK, self.step_s + self.usual_s)

    def shown(self, at_s: float, *, reports: bool) -> Timeline:
        """The timeline up to now; workers that report no steps train as long as they run."""
        now = replace(self, until_s=max(at_s, self.until_s))
        if reports or self.ran_s is None:
            return now._stalled(now.until_s)
        return now.begin(Phase.TRAINING, self.ran_s)

    def begin(self, phase: Phase, at_s: float) -> Timeline:
        """The timeline with a new span, unless the node does that already."""
        now = replace(self, until_s=max(at_s, self.until_s))
        if self.spans and self.spans[-1].phase is phase:
            return now
        return replace(now, spans=_bounded((*self.spans, Span(from_s=at_s, phase=phase))))

    def after(self, before: Timeline | None) -> Timeline:
        """This timeline after that of the node's agents before: between them the node was gone."""
        if before is None:
            return self
        gone = Span(from_s=before.until_s, phase=Phase.GONE)
        # The spans are in order, even if this agent's clock has been set back since.
        mine = tuple(s for s in self.spans if s.from_s > before.until_s)
        return replace(self, spans=_bounded((*before.spans, gone, *mine)))


def intervals(
    spans: Iterable[Span], end_s: float | None
) -> list[tuple[float, float | None, Phase]]:
    """Each span with its end, None for now: without gaps, in order, none of them empty."""
    found: list[tuple[float, float | None, Phase]] = []
    to_s = end_s
    for span in reversed(list(spans)):
        # One whose start is known too late, after that of the next one, lasts no time.
        if to_s is None or span.from_s < to_s:
            found.append((span.from_s, to_s, span.phase))
            to_s = span.from_s
    return found[::-1]


def _bounded(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """At most `SPANS` spans: the shortest save goes first, then the shortest of all others."""
    while len(spans) > SPANS:
        # Neither the first one, with which the node's picture begins, nor the last, which goes on.
        lengths_s = [b.from_s - a.from_s for a, b in pairwise(spans[1:])]
        _, _, least = min(
            (spans[place].phase is not Phase.SAVING, length_s, place)
            for place, length_s in enumerate(lengths_s, start=1)
        )
        rest = (*spans[:least], *spans[least + 1 :])
        # The two spans around it may have the same phase: then they are one from now on.
        pairs = zip((None, *rest), rest, strict=False)
        spans = tuple(span for last, span in pairs if last is None or last.phase is not span.phase)
    return spans


def to_record(timeline: Timeline) -> dict[str, Any]:
    """The timeline as JSON."""
    spans = [[round(span.from_s, 2), str(span.phase)] for span in timeline.spans]
    return {"spans": spans, "until_s": round(timeline.until_s, 2)}


@dataclass(frozen=True, kw_only=True)
class KeptTimeline:
    """The record of a timeline: its spans with their starts."""

    spans: tuple[tuple[float, str], ...]
    until_s: float


def from_record(record: KeptTimeline) -> Timeline:
    """The timeline in a record; a phase that this version does not know is IDLE."""
    known = {str(phase): phase for phase in Phase}
    spans = (Span(from_s=at_s, phase=known.get(name, Phase.IDLE)) for at_s, name in record.spans)
    return Timeline(spans=tuple(spans), until_s=record.until_s)
