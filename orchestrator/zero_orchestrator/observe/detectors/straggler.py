"""The verdict about slow ranks: which rank computes longer than the others, which wait for it.

A pure function of the times that rank 0 reports, in windows of at least `WINDOW_S` of training. A
rank is slow only if the others lose time by it, step by step: what slows all ranks, or one rank for
a moment, or delays nobody, is no verdict. Clocks of two nodes are never compared: each rank
measures the length of its own computing and of its own waits.

Source of the idea: NVRx's straggler detection, which compares the ranks with each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from zero_contract.worker import SLOW_FACTOR, RankTimes
from zero_orchestrator.membership.job_state import Members
from zero_orchestrator.observe.detectors.detector import Finding, Question, Report, Strains
from zero_orchestrator.observe.detectors.strain import cause
from zero_orchestrator.observe.verdicts import Kind, Verdict

SLOW_STEPS = 0.5
"""The part of the steps of a window in which a slow rank is slow, at least. A pause in one step may
be longer than the rest of the window; it makes no straggler."""
LOST = 0.5
"""The part of what it computes longer that the other ranks wait longer than it, at least: half of
them, in half of the steps."""
WINDOW_S = 5.0
"""The least training time of a window."""
WINDOW_STEPS = 3
"""The least number of steps of a window."""
WINDOWS = 6
"""The number of windows in a row after which a verdict is made, or withdrawn."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A slow rank."""

    rank: int
    factor: float
    """How many times as long as the other ranks it computes, in the last window."""
    since_step: int
    """The step before the first window in which it was slow."""
    lost_s: float
    """The time that each step takes longer because of it, in the last window."""


@dataclass(frozen=True, kw_only=True)
class _Slow:
    """How often in a row a rank was slow, and not slow, at last."""

    since_step: int
    factor: float
    lost_s: float
    windows: int = 1
    fast_windows: int = 0

    @property
    def is_verdict(self) -> bool:
        return self.windows >= WINDOWS


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """The verdicts of a round, as of the last report."""

    begin: RankTimes | None = None
    """The report with which the current window begins."""
    slow: Mapping[int, _Slow] = field(default_factory=dict)

    @property
    def verdicts(self) -> tuple[Straggler, ...]:
        """The stragglers now, by rank."""
        return tuple(
            Straggler(rank=rank, factor=one.factor, since_step=one.since_step, lost_s=one.lost_s)
            for rank, one in sorted(self.slow.items())
            if one.is_verdict
        )

    def add(self, report: RankTimes) -> Stragglers:
        """The verdicts after one more report."""
        begin = self.begin
        if begin is None or len(begin.compute_s) != len(report.compute_s):
            return Stragglers(begin=report)
        steps = report.steps - begin.steps
        compute_s = _per_step(begin.compute_s, report.compute_s, steps)
        wait_s = _per_step(begin.wait_s, report.wait_s, steps)
        trained_s = steps * min(map(sum, zip(compute_s, wait_s, strict=True)), default=0.0)
        if steps < WINDOW_STEPS or trained_s < WINDOW_S:
            return self
        pairs = zip(begin.slow_steps, report.slow_steps, strict=True)
        often = [rank for rank, (old, new) in enumerate(pairs) if new - old >= SLOW_STEPS * steps]
        # In the mean as well, but not in the mean alone: that may be one long pause.
        slower = slow_ranks(compute_s, wait_s)
        found = {rank: slower[rank] for rank in often if rank in slower}
        ranks = self.slow.keys() | found.keys()
        now = {rank: self._next(rank, found.get(rank), begin.step) for rank in ranks}
        slow = {rank: one for rank, one in now.items() if one is not None}
        return Stragglers(begin=report, slow=slow)

    def _next(self, rank: int, found: tuple[float, float] | None, begin_step: int) -> _Slow | None:
        """The record of a rank after a window in which it was slow, or was not."""
        known = self.slow.get(rank)
        if found is None:
            # One fast window ends what is no verdict yet; a verdict needs as many as have made it.
            if known is None or not known.is_verdict or known.fast_windows + 1 >= WINDOWS:
                return None
            return replace(known, fast_windows=known.fast_windows + 1)
        factor, lost_s = found
        if known is None:
            return _Slow(since_step=begin_step, factor=factor, lost_s=lost_s)
        windows = known.windows + 1
        return replace(known, factor=factor, lost_s=lost_s, windows=windows, fast_windows=0)


def _per_step(begin_s: Sequence[float], end_s: Sequence[float], steps: int) -> list[float]:
    return [(end - begin) / max(steps, 1) for begin, end in zip(begin_s, end_s, strict=True)]


def slow_ranks(
    compute_s: Sequence[float], wait_s: Sequence[float]
) -> dict[int, tuple[float, float]]:
    """By rank that is slow in the mean: its factor, and what the others lose in a step."""
    found = {}
    usual_s, others_wait_s = _others_median(compute_s), _others_median(wait_s)
    for rank, (own_s, usual) in enumerate(zip(compute_s, usual_s, strict=True)):
        lost_s = others_wait_s[rank] - wait_s[rank]
        # A rank that keeps nobody waiting costs the job nothing, however long it computes.
        if own_s >= SLOW_FACTOR * usual > 0 and lost_s >= LOST * (own_s - usual):
            found[rank] = (own_s / usual, lost_s)
    return found


def _others_median(values: Sequence[float]) -> list[float]:
    """For each rank, the median of the values of all other ranks; 0 for a single rank."""
    if len(values) < 2:
        return [0.0] * len(values)
    ranks = sorted(range(len(values)), key=values.__getitem__)
    ordered = [values[rank] for rank in ranks]
    low, high = (len(values) - 2) // 2, (len(values) - 1) // 2  # of the others, one fewer
    medians = [0.0] * len(values)
    # Sorted once, and each rank left out in turn: a job may have thousands.
    for place, rank in enumerate(ranks):
        medians[rank] = sum(ordered[at + (at >= place)] for at in (low, high)) / 2
    return medians


class SlowRanks:
    """The detector: a straggler is told once the cause has been looked for on its node."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._known = Stragglers()
        self._causes: dict[int, str] = {}
        """By slow rank, the cause in words; empty if none can be seen."""

    @property
    def asks(self) -> Question | None:
        """The cause of a rank that is slow since the last report."""
        new = any(one.rank not in self._causes for one in self._known.verdicts)
        return Question.STRAIN if new else None

    def add(self, report: Report, now_s: float) -> list[Finding]:
        """The stragglers."""
        if isinstance(report, RankTimes):
            self._known = self._known.add(report)
            slow = {one.rank for one in self._known.verdicts}
            self._causes = {rank: why for rank, why in self._causes.items() if rank in slow}
        elif isinstance(report, Strains):
            strain = report.by_node
            nodes = {one.rank: self._members.node_of(one.rank).id for one in self._known.verdicts}
            # What the nodes of the ranks that are not slow have as well is no cause.
            fast = (one.id for one in self._members.nodes if one.id not in nodes.values())
            others = [strain.get(node, {}) for node in fast]
            for rank, node in nodes.items():
                self._causes.setdefault(rank, cause(strain.get(node, {}), others))
        known = (one for one in self._known.verdicts if one.rank in self._causes)
        return [self._finding(one, self._causes[one.rank]) for one in known]

    def _finding(self, one: Straggler, why: str) -> Finding:
        node = self._members.node_of(one.rank).id
        who = f"rank {one.rank} on {node} computes"
        text = (
            f"{who} {one.factor:.1f} x slower since step {one.since_step:,}, and each step takes "
            f"{one.lost_s:.2g} s longer" + (f": {why}" if why else "")
        )
        return Finding(
            verdict=Verdict(
                kind=Kind.STRAGGLER,
                text=text,
                rank=one.rank,
                node=node,
                since_step=one.since_step,
                factor=round(one.factor, 3),
            ),
            over=f"{who} as fast as the other ranks again, at",
            about={"rank": one.rank, "host": node},
            facts={
                "factor": one.factor,
                "since_step": one.since_step,
                "lost_s": one.lost_s,
                "cause": why,
            },
        )
