"""Time as the orchestrator sees it: seconds that only go forward, handed in, never looked up.

A clock tells the time and repeats an action. Under the system's clock the action has a thread
of its own; under a `ManualClock` it runs inside `advance`, at exactly the time it is due. So a
test or a simulation with a thousand nodes moves hours in no time, without threads, and the
same way each time.

Must always hold: no decision reads the wall clock, and no two nodes compare their clocks (the
leases of the store are the shared clock). Who calls it: everything that waits or judges silence.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

_log = logging.getLogger(__name__)

Action = Callable[[], float | None]
"""Does something; returns the seconds until it is due again, or None for never."""

_JOIN_S = 1.0
"""`cancel` waits so long for an action that is running."""


class Repeating(Protocol):
    """An action that is being repeated."""

    def cancel(self) -> None:
        """Never run it again; waits briefly for a run in progress. May be called from the run."""


class Clock(Protocol):
    """A monotonic clock."""

    def now(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""

    def repeat(self, action: Action, after_s: float) -> Repeating:
        """Run `action` after so many seconds, and again whenever it says."""


class SystemClock:
    """This machine's monotonic clock."""

    def now(self) -> float:
        """Seconds, as `time.monotonic`."""
        return time.monotonic()

    def repeat(self, action: Action, after_s: float) -> Repeating:
        """Run `action` on a daemon thread of its own."""
        return _RepeatingThread(action, after_s)


class _RepeatingThread:
    def __init__(self, action: Action, after_s: float) -> None:
        self._action = action
        self._cancelled = threading.Event()
        name = getattr(action, "__qualname__", "repeat")
        self._thread = threading.Thread(target=self._run, args=(after_s,), name=name, daemon=True)
        self._thread.start()

    def _run(self, after_s: float | None) -> None:
        while after_s is not None and not self._cancelled.wait(after_s):
            after_s = _run_logged(self._action)

    def cancel(self) -> None:
        self._cancelled.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)


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
        again_s = None if self._cancelled else _run_logged(self._action)
        return None if self._cancelled else again_s

    def cancel(self) -> None:
        self._cancelled = True


def _run_logged(action: Action) -> float | None:
    """A mistake in an action ends its repetition, loudly, and nothing else."""
    try:
        return action()
    except Exception:
        _log.exception("an action repeated by the clock failed; it is not run again")
        return None
