"""How fast the workers of a node train: over the last minute of a round."""

from __future__ import annotations

from collections import deque

from zero_contract.worker import Progress
from zero_orchestrator.observe.pace import Speed

WINDOW_S = 60.0
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
        if self._last is not None and progress.step <= self._last[1].step:
            return
        self._last = now_s, progress
        if not self._kept or now_s - self._kept[-1][0] >= _APART_S:
            self._kept.append(self._last)
        while len(self._kept) > 1 and now_s - self._kept[1][0] >= WINDOW_S:
            self._kept.popleft()

    @property
    def speed(self) -> Speed | None:
        """The speed up to the last step; None before the second one."""
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
