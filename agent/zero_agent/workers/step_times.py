"""How long the steps of this node's workers take, by rank: a histogram that only grows.

A step lasts from the report of the step before to its own, without the saves in between. The first
step of a round is left out: it contains imports, the load of a checkpoint and compilation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from zero_contract.worker import Progress

BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the buckets; one more bucket has the longer steps."""


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """The steps of one rank."""

    counts: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)
    """Steps in each bucket, not cumulative."""
    sum_s: float = 0.0

    def add(self, duration_s: float) -> Histogram:
        """The histogram with one more step."""
        bucket = bisect_left(BOUNDS_S, duration_s)
        counts = (*self.counts[:bucket], self.counts[bucket] + 1, *self.counts[bucket + 1 :])
        return Histogram(counts=counts, sum_s=self.sum_s + duration_s)


@dataclass(frozen=True, kw_only=True)
class _Last:
    at_s: float
    step: int | None
    saving_s: float = 0.0
    """Saves since then."""


class StepTimes:
    """The histograms of all ranks that this node has had; `read` may be called on any thread."""

    def __init__(self) -> None:
        self._by_rank: Mapping[int, Histogram] = {}
        self._last: dict[int, _Last] = {}

    def begin(self) -> None:
        """A round begins."""
        self._last.clear()

    def add(self, rank: int, now_s: float, progress: Progress | None) -> None:
        """A worker has reported a step, or the same step again; None: a step without a number."""
        last, step = self._last.get(rank), progress.step if progress is not None else None
        saving_s = progress.saving_s if progress is not None else 0.0
        if last is not None and step is not None and step == last.step:
            self._last[rank] = _Last(at_s=last.at_s, step=step, saving_s=last.saving_s + saving_s)
            return
        self._last[rank] = _Last(at_s=now_s, step=step)
        if last is not None:
            duration_s = max(0.0, now_s - last.at_s - last.saving_s - saving_s)
            known = self._by_rank.get(rank, Histogram())
            self._by_rank = {**self._by_rank, rank: known.add(duration_s)}

    def read(self) -> Mapping[int, Histogram]:
        """The histogram of each rank."""
        return self._by_rank
