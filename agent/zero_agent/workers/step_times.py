"""How long the steps of this node's workers take, by rank, and how fast the workers train.

A histogram only grows, for Prometheus. The counts of a round have finer buckets, for quantiles. A
step lasts from the report of the step before to its own, without the saves in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from zero_contract.worker import Progress, Restored, Saved
from zero_orchestrator.observe.pace import Histogram, Speed, add_up, bucket

T = TypeVar("T", "Saves", "Spent")


@dataclass(frozen=True, kw_only=True)
class _Last:
    at_s: float
    step: int | None
    saving_s: float = 0.0
    """Saves since then."""


class StepTimes:
    """The histograms of all ranks that this node has had."""

    def __init__(self) -> None:
        self.by_rank: Mapping[int, Histogram] = {}
        """Replaced, and so read on any thread."""
        self.counts: dict[int, dict[int, int]] = {}
        """By rank, the steps of this round in the buckets of `pace`."""
        self._last: dict[int, _Last] = {}

    def begin(self) -> None:
        """A round begins."""
        self._last.clear()
        self.counts.clear()

    def add(self, rank: int, now_s: float, progress: Progress | None) -> float | None:
        """A worker has reported a step, which took so long without saves.

        None: the same step again, or the round's first.
        """
        last, step = self._last.get(rank), progress.step if progress is not None else None
        saving_s = progress.saving_s if progress is not None else 0.0
        # A process with several engines reports a step more than once: only its saves are new.
        if last is not None and step is not None and step == last.step:
            self._last[rank] = _Last(at_s=last.at_s, step=step, saving_s=last.saving_s + saving_s)
            return None
        self._last[rank] = _Last(at_s=now_s, step=step)
        # The first step of a round contains imports, the load of a checkpoint and compilation.
        if last is None:
            return None
        duration_s = max(0.0, now_s - last.at_s - last.saving_s - saving_s)
        known = self.by_rank.get(rank, Histogram())
        self.by_rank = {**self.by_rank, rank: known.add(duration_s)}
        self.counts[rank] = add_up([self.counts.get(rank, {}), {bucket(duration_s): 1}])
        return duration_s


def _grown(record: T, **by: float) -> T:
    """A record whose fields are larger by so much."""
    return replace(record, **{name: getattr(record, name) + more for name, more in by.items()})


@dataclass(frozen=True, kw_only=True)
class Saves:
    """The saves of a rank to disk, or in memory."""

    committed: int = 0
    failed: int = 0
    size_bytes: int = 0
    """Its parts of all saves that were committed."""
    stall_s: float = 0.0
    """Training waited for them."""
    write_s: float = 0.0
    """The writes of its parts."""
    publish_s: float = 0.0
    """Rank 0 has checked the parts of all ranks, and published checkpoints."""
    last_s: float | None = None
    """The last one, from its beginning to its end in the background."""

    def add(self, saved: Saved) -> Saves:
        """After the end of one more."""
        if not saved.committed:
            return _grown(self, failed=1)
        names = ("size_bytes", "stall_s", "write_s", "publish_s")
        more = {name: getattr(saved, name) for name in names}
        return replace(_grown(self, committed=1, **more), last_s=saved.total_s)


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What a rank of this node has done since the start of the agent."""

    compute_s: float = 0.0
    wait_s: float = 0.0
    saving_s: float = 0.0
    """Training waited for saves."""
    saves: Mapping[bool, Saves] = field(default_factory=lambda: {False: Saves()})
    """In memory or not -> the saves that have ended."""
    restores: int = 0
    """Loads of checkpoints by all ranks, as rank 0 has reported them."""
    restore_s: float = 0.0
    """Rank 0 has read and verified checkpoints."""
    restored_bytes: int = 0
    """What it has read and verified."""

    def with_progress(self, progress: Progress) -> Spent:
        """After a step."""
        names = ("compute_s", "wait_s", "saving_s")
        return _grown(self, **{name: getattr(progress, name) for name in names})

    def with_save(self, saved: Saved) -> Spent:
        """After the end of a save."""
        known = self.saves.get(saved.in_memory, Saves())
        return replace(self, saves={**self.saves, saved.in_memory: known.add(saved)})

    def with_restore(self, restored: Restored) -> Spent:
        """After the load of a checkpoint."""
        read_bytes = restored.read_bytes
        return _grown(self, restores=1, restore_s=restored.load_s, restored_bytes=read_bytes)


WINDOW_S = 60.0
"""The speed is that of the last minute."""
_APART_S = 1.0
"""The shortest time between two steps that are kept."""


class SpeedMeter:
    """The steps of the last minute; those of a round alone, since steps are repeated after it."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Progress]] = deque()
        self._last: tuple[float, Progress] | None = None

    def begin(self) -> None:
        """A round begins."""
        self._kept.clear()
        self._last = None

    def add(self, progress: Progress, now_s: float) -> None:
        """A worker has ended a step; further workers that end the same step do not count."""
        # All ranks of the node end the same step, and one after the other: the first one counts.
        if self._last is not None and progress.step <= self._last[1].step:
            return
        self._last = now_s, progress
        if not self._kept or now_s - self._kept[-1][0] >= _APART_S:
            self._kept.append(self._last)
        # One that is older than the window stays: from there the speed is that of all of it.
        while len(self._kept) > 1 and now_s - self._kept[1][0] >= WINDOW_S:
            self._kept.popleft()

    @property
    def speed(self) -> Speed | None:
        """The speed up to the last step; None before the second one."""
        # The clock may not have moved between two steps.
        if self._last is None or self._last[0] <= self._kept[0][0]:
            return None
        (from_s, first), (to_s, last) = self._kept[0], self._last
        spent_s = to_s - from_s
        return Speed(
            steps=_short((last.step - first.step) / spent_s),
            samples=_short((last.samples - first.samples) / spent_s) if last.samples else None,
            tokens=_short((last.tokens - first.tokens) / spent_s) if last.tokens else None,
        )


def _short(value: float) -> float:
    return float(f"{value:.4g}")
