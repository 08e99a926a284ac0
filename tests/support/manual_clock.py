"""A clock that stands still until a test advances it."""

from __future__ import annotations

import heapq
import itertools
import threading

from zero_contract.clock import Action, Repeating, run_logged


class ManualClock:
    """A clock that stands still until it is moved."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._due: list[tuple[float, int, _ManualRepeating]] = []
        self._ticket = itertools.count()  # actions due at the same time run in order of booking
        self._lock = threading.Lock()

    def now(self) -> float:
        """Seconds, as last moved to."""
        return self._now

    def repeat(self, action: Action, after_s: float) -> Repeating:
        """Run `action` inside `advance`, when it is due."""
        repeating = _ManualRepeating(action)
        self._book(repeating, after_s)
        return repeating

    def advance(self, seconds: float) -> None:
        """Move forward, stopping at each action that falls due on the way to run it."""
        if seconds < 0:
            raise ValueError(f"a clock never goes back: advance({seconds:g})")
        end = self._now + seconds
        while (repeating := self._next_due(end)) is not None:
            again_s = repeating.run()
            if again_s is not None:
                self._book(repeating, again_s)
        self._now = end

    def _book(self, repeating: _ManualRepeating, after_s: float) -> None:
        with self._lock:
            heapq.heappush(self._due, (self._now + after_s, next(self._ticket), repeating))

    def _next_due(self, end: float) -> _ManualRepeating | None:
        with self._lock:
            if not self._due or self._due[0][0] > end:
                return None
            self._now, _, repeating = heapq.heappop(self._due)
            return repeating


class _ManualRepeating:
    def __init__(self, action: Action) -> None:
        self._action = action
        self._cancelled = False

    def run(self) -> float | None:
        again_s = None if self._cancelled else run_logged(self._action)
        return None if self._cancelled else again_s

    def cancel(self) -> None:
        self._cancelled = True
