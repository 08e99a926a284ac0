"""The history of a job: its steps, bounded whatever their number, and its newest checkpoints.

The agent of rank 0 adds what its worker reports, and writes the record of the job; the agent of the
next rank 0 continues that record. `History` is a value, and its methods are pure functions. Times
are wall clocks of nodes, in seconds since the epoch: for people only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from msgspec import Struct, structs

from zero_contract.decoding import encode
from zero_orchestrator.observe.pace import Counts, add_up, bucket

POINTS = 512
"""Most points of a history. A point covers `History.stride` steps, and that doubles when full."""
CHECKPOINTS = 100
"""Number of checkpoints that a history keeps: the newest."""


class Point(Struct, frozen=True, kw_only=True, array_like=True):
    """One step, or several steps in a row."""

    step: int
    """The last of its steps."""
    time_s: float
    """When the last of its steps ended."""
    samples: int
    """Samples that all steps up to this one have consumed; 0: not known."""
    workers: int
    """World size at the last of its steps."""
    loss: float | None = None
    """Mean over its steps that have a finite loss."""
    low: float | None = None
    high: float | None = None
    losses: int = 0
    """Number of its steps that have a finite loss."""
    tokens: int = 0
    """Tokens that all steps up to this one have consumed; 0: the script does not count them."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """One checkpoint that was published: its manifest is in place."""

    step: int
    tag: str
    time_s: float
    samples: int
    digest: str
    """Digest of the manifest, which holds the digest of every block."""
    size_bytes: int = 0
    """The files of all ranks; 0: the save has not ended yet, or the agent that knew is gone."""
    stall_s: float = 0.0
    """Seconds for which training waited for the save."""
    write_s: float = 0.0
    """Seconds in which rank 0 wrote its file."""
    publish_s: float = 0.0
    """Seconds in which rank 0 then checked the files of all ranks, and published them."""


@dataclass(frozen=True, kw_only=True)
class Failing:
    """The saves to disk since the last one that succeeded: they have failed."""

    saves: int
    """How many; a save that is repeated counts once."""
    step: int
    """Of the last one."""
    problem: str
    time_s: float
    """When the last one failed, or was waited for: seconds since the epoch."""
    waits_for: str = ""
    """What training waits for, to repeat it, such as room; "": it goes on."""
    left_s: float = 0.0
    """Seconds for which it waits at most, from `time_s` on."""

    def in_words(self, now_s: float | None = None) -> str:
        """As a part of a sentence, after "saves"; with the time, how long it still waits."""
        text = f"the last {self.saves} failed" if self.saves > 1 else "the last one failed"
        text = f"{text}: {self.problem}"
        if not self.waits_for:
            return text
        left_s = self.left_s - (max(0.0, now_s - self.time_s) if now_s is not None else 0.0)
        left = f"{left_s / 60:.0f} min" if left_s >= 60 else f"{max(0.0, left_s):.0f} s"
        return f"{text}; waiting for {self.waits_for}, {left} left"


@dataclass(frozen=True, kw_only=True)
class History:
    """The steps of a job so far, and its newest checkpoints on disk."""

    points: tuple[Point, ...] = ()
    stride: int = 1
    """Steps that one point covers at most."""
    checkpoints: tuple[Saved, ...] = ()
    saved: int = 0
    """Number of all checkpoints on disk so far."""
    kept: int = 0
    """Number of all in-memory checkpoints so far."""
    in_memory: Saved | None = None
    """The newest in-memory checkpoint whose save has ended."""
    failing: Failing | None = None
    """None: the last save to disk succeeded, or there was none."""
    durations: Counts = field(default_factory=dict)
    """The durations of the steps of one rank, in the buckets of `pace`; repeated steps as well."""

    @property
    def written(self) -> Saved | None:
        """The newest checkpoint on disk whose save has ended, so that its times are known."""
        return next((one for one in reversed(self.checkpoints) if one.size_bytes), None)

    @property
    def resolution_s(self) -> float:
        """The mean time between two points; a history that is written as often loses nothing."""
        if len(self.points) < 2:
            return 0.0
        return (self.points[-1].time_s - self.points[0].time_s) / (len(self.points) - 1)

    def stepped(
        self,
        step: int,
        *,
        time_s: float,
        samples: int,
        workers: int,
        loss: float | None,
        tokens: int = 0,
    ) -> History:
        """The history after one more step; unchanged by a step that is in it already."""
        # One that is repeated after a failure has the same loss, and its time is a gap.
        if self.points and step <= self.points[-1].step:
            return self
        # Without those that are not finite: one NaN would make the mean of all others one.
        loss = loss if loss is not None and math.isfinite(loss) else None
        one = Point(
            step=step,
            time_s=time_s,
            samples=samples,
            workers=workers,
            loss=loss,
            low=loss,
            high=loss,
            losses=int(loss is not None),
            tokens=tokens,
        )
        if self.points and self._place(self.points[-1]) == self._place(one):
            return replace(self, points=(*self.points[:-1], _merged([self.points[-1], one])))
        return replace(self, points=(*self.points, one))._bounded()

    def with_duration(self, took_s: float) -> History:
        """The history after one more step of a rank, new or repeated, that took so long."""
        return replace(self, durations=add_up([self.durations, {bucket(took_s): 1}]))

    def with_checkpoint(self, saved: Saved) -> History:
        """The history after one more checkpoint."""
        kept = (*self.checkpoints, saved)[-CHECKPOINTS:]
        return replace(self, checkpoints=kept, saved=self.saved + 1, failing=None)

    def with_failure(self, step: int, problem: str, time_s: float) -> History:
        """The history after a save that has failed, once or again."""
        # A save that is repeated at the same step is one that fails again, not one more.
        known = self.failing
        saves = 1 if known is None else known.saves + (known.step != step)
        failing = Failing(saves=saves, step=step, problem=problem, time_s=time_s)
        return replace(self, failing=failing)

    def with_wait(self, step: int, what: str, left_s: float, time_s: float) -> History:
        """The history when training waits to repeat the save that has failed."""
        known = self.failing
        if known is None or known.step != step:
            return self
        waits = replace(known, time_s=time_s, waits_for=what, left_s=left_s)
        return replace(self, failing=waits)

    def with_times(self, step: int, **times: float) -> History:
        """The history with fields of the newest checkpoint, if that is of this step."""
        if not self.checkpoints or self.checkpoints[-1].step != step:
            return self
        newest = replace(self.checkpoints[-1], **times)  # type: ignore[arg-type]
        return replace(self, checkpoints=(*self.checkpoints[:-1], newest))

    def after(self, before: History) -> History:
        """This history after that of the job before it."""
        # Steps after the last checkpoint are repeated, and count once, as in `stepped`.
        last = before.points[-1].step if before.points else 0
        return History(
            points=(*before.points, *(point for point in self.points if point.step > last)),
            stride=max(before.stride, self.stride),
            checkpoints=(*before.checkpoints, *self.checkpoints)[-CHECKPOINTS:],
            saved=before.saved + self.saved,
            kept=before.kept + self.kept,
            in_memory=self.in_memory or before.in_memory,
            # A save that has succeeded since then has ended what failed before.
            failing=self.failing if self.failing or self.saved else before.failing,
            durations=add_up([before.durations, self.durations]),
        )._bounded()

    def _bounded(self) -> History:
        now = self
        while len(now.points) > POINTS:
            wider = replace(now, stride=2 * now.stride)
            merged = (_merged(list(of)) for _, of in groupby(now.points, wider._place))
            now = replace(wider, points=tuple(merged))
        return now

    def _place(self, point: Point) -> int:
        # By the step alone, whichever the first one was: two places join when the stride doubles.
        return (point.step - 1) // self.stride


def _merged(points: Sequence[Point]) -> Point:
    """Points in a row as one."""
    losses = sum(point.losses for point in points)
    # A point counts as often as it has losses: the mean is that of all steps.
    parts = [(p.loss, p.losses / losses) for p in points if p.loss is not None]
    lows = [point.low for point in points if point.low is not None]
    highs = [point.high for point in points if point.high is not None]
    return structs.replace(
        points[-1],
        loss=sum(loss * part for loss, part in parts) if parts else None,
        low=min(lows, default=None),
        high=max(highs, default=None),
        losses=losses,
    )


# ---- the record ----


def to_record(history: History) -> dict[str, Any]:
    """The history as JSON, in which a point is a list of its fields."""
    # Rounded, since all of it is written again every few seconds.
    record: dict[str, Any] = json.loads(encode(history), parse_float=_short)
    return record


def _short(text: str) -> float:
    """Seconds and losses with as many digits as anyone can see."""
    value = float(text)
    # Six digits of a time since the epoch would be exact to hours only.
    return round(value, 2) if abs(value) > 1e6 else float(f"{value:.6g}")
