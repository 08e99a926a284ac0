"""Whether a job has become slower in a way that no rank explains: all ranks wait longer.

A pure function of the times that rank 0 reports, in windows as in `straggler`. A slow rank makes
the others wait, and not itself; a slow network makes all of them wait.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from zero_contract.worker import RankTimes
from zero_orchestrator.observe.detectors.straggler import WINDOW_S, WINDOW_STEPS

FACTOR = 1.25
"""A slow step takes so many times as long as earlier steps, at least."""
WAITED = 0.5
"""The part of what a step takes longer that every rank waits longer, at least."""
WINDOWS = 3
"""The number of slow windows in a row."""
EARLIER = 3
"""The number of earlier windows that a step is compared with, at least."""
_KEPT = 60


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """The knowledge about the steps of a round."""

    begin: RankTimes | None = None
    """The report with which the current window begins."""
    usual: tuple[tuple[float, float], ...] = ()
    """Of windows that were not slow: the time of a step, and the shortest wait of a rank in it."""
    in_a_row: int = 0
    """The number of slow windows."""

    @property
    def is_slower(self) -> bool:
        """Whether the last windows were slow."""
        return self.in_a_row >= WINDOWS

    def add(self, report: RankTimes) -> Slowdown:
        """The knowledge after one more report."""
        begin = self.begin
        if begin is None or len(begin.wait_s) != len(report.wait_s) or not report.wait_s:
            return Slowdown(begin=report)
        steps = report.steps - begin.steps
        spent_s = [
            (compute_s + wait_s - before_compute_s - before_wait_s, wait_s - before_wait_s)
            for compute_s, wait_s, before_compute_s, before_wait_s in zip(
                report.compute_s, report.wait_s, begin.compute_s, begin.wait_s, strict=True
            )
        ]
        trained_s = min(of_rank for of_rank, _ in spent_s)
        if steps < WINDOW_STEPS or trained_s < WINDOW_S:
            return self
        step_s, wait_s = trained_s / steps, min(wait_s for _, wait_s in spent_s) / steps
        if len(self.usual) >= EARLIER:
            usual_s = median(step_s for step_s, _ in self.usual)
            usual_wait_s = median(wait_s for _, wait_s in self.usual)
            # A rank that computes longer does not wait longer, and explains the slow step itself.
            waited = wait_s - usual_wait_s >= WAITED * (step_s - usual_s)
            if waited and step_s >= FACTOR * usual_s:
                return replace(self, begin=report, in_a_row=self.in_a_row + 1)
        usual = (*self.usual, (step_s, wait_s))[-_KEPT:]
        return Slowdown(begin=report, usual=usual)
