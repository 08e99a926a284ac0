"""The verdict about slow storage: a rank writes slower than the others, or all slower than before.

A pure function of the rates at which the ranks have written their parts of each checkpoint. Writes
of less than `LEAST_S` are not judged: what they wait for is not the storage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import eq
from statistics import median

from zero_contract.worker import RankTimes
from zero_orchestrator.membership.job_state import Members
from zero_orchestrator.observe.detectors.detector import Finding, Report
from zero_orchestrator.observe.links import rate_in_words
from zero_orchestrator.observe.verdicts import Kind, Verdict

SLOWER = 3.0
"""A slow write has at most this fraction of the usual rate, and takes `LEAST_S` at least."""
LEAST_S = 1.0
IN_A_ROW = 2
"""The number of slow checkpoints in a row that are a verdict."""
EARLIER = 3
"""The number of earlier checkpoints that the rate of all ranks is compared with, at least."""
_KEPT = 20


@dataclass(frozen=True, kw_only=True)
class SlowWrite:
    """A slow write."""

    rank: int | None
    """The slow rank; None: all ranks."""
    bytes_per_s: float
    usual_bytes_per_s: float
    """The rate of the other ranks, or of all ranks earlier."""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """The knowledge about the storage."""

    last: tuple[float, ...] = ()
    """The rates of the last checkpoint, by rank."""
    medians: tuple[float, ...] = ()
    """The median rates of checkpoints that were not slow, oldest first."""
    slow: SlowWrite | None = None
    in_a_row: int = 0

    @property
    def verdict(self) -> SlowWrite | None:
        """The slow storage, if it is a verdict now."""
        return self.slow if self.in_a_row >= IN_A_ROW else None

    def add(self, report: RankTimes) -> Storage:
        """The knowledge after one more report; most reports are of no new checkpoint."""
        rates, write_s = report.write_bytes_per_s, report.write_s
        if not rates or not all(rates):
            return self
        # A rank has not noticed the end of this save yet: it still has the rate of the last one.
        if len(rates) == len(self.last) and any(map(eq, rates, self.last)):
            return self
        # One rank that is slower than the others; or else all ranks, if slower than before.
        found, slowest = None, min(range(len(rates)), key=rates.__getitem__)
        others = [*rates[:slowest], *rates[slowest + 1 :]]
        if others and write_s[slowest] >= LEAST_S and rates[slowest] * SLOWER <= median(others):
            found = SlowWrite(
                rank=slowest, bytes_per_s=rates[slowest], usual_bytes_per_s=median(others)
            )
        elif len(self.medians) >= EARLIER and median(write_s) >= LEAST_S:
            rate, usual = median(rates), median(self.medians)
            if rate * SLOWER <= usual:
                found = SlowWrite(rank=None, bytes_per_s=rate, usual_bytes_per_s=usual)
        # Only of those that were not slow: slow storage must not become the usual one.
        if found is None:
            medians = (*self.medians, median(rates))[-_KEPT:]
            return Storage(last=rates, medians=medians)
        same = self.slow is not None and self.slow.rank == found.rank
        return replace(self, last=rates, slow=found, in_a_row=self.in_a_row + 1 if same else 1)


class SlowStorage:
    """The detector."""

    asks = None

    def __init__(self, members: Members) -> None:
        self._members = members
        self._known = Storage()
        self._step = 0

    def add(self, report: Report, now_s: float) -> list[Finding]:
        """The slow storage, if it is slow."""
        if isinstance(report, RankTimes):
            self._known, self._step = self._known.add(report), report.step
        found = self._known.verdict
        return [] if found is None else [self._finding(found)]

    def _finding(self, found: SlowWrite) -> Finding:
        who, usual, node = "all ranks write", "earlier", ""
        if found.rank is not None:
            node = self._members.node_of(found.rank).id
            who, usual = f"rank {found.rank} on {node} writes", "the other ranks"
        text = (
            f"{who} checkpoints at {rate_in_words(found.bytes_per_s)}; {usual}: "
            f"{rate_in_words(found.usual_bytes_per_s)}"
        )
        rates = {"bytes_per_s": found.bytes_per_s, "usual_bytes_per_s": found.usual_bytes_per_s}
        return Finding(
            verdict=Verdict(
                kind=Kind.SLOW_STORAGE,
                text=text,
                rank=found.rank,
                node=node,
                since_step=self._step,
                factor=round(found.usual_bytes_per_s / found.bytes_per_s, 3),
            ),
            over="checkpoints are written as fast as before again, at",
            facts={"rank": found.rank, "host": node, **rates},
        )
