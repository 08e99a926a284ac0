"""Time as the orchestrator sees it: seconds that only go forward, handed in, never looked up.

A clock tells the time and repeats an action. Under the system's clock the action has a thread
of its own; under the tests' `ManualClock` it runs when the test advances the time, so a
simulation with a thousand nodes moves hours in no time, without threads, and the same way each
time.

Must always hold: no decision reads the wall clock, and no two nodes compare their clocks (the
leases of the store are the shared clock). Who calls it: everything that waits or judges silence.
"""

from __future__ import annotations

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
            after_s = run_logged(self._action)

    def cancel(self) -> None:
        self._cancelled.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)


def run_logged(action: Action) -> float | None:
    """A mistake in an action ends its repetition, loudly, and nothing else."""
    try:
        return action()
    except Exception:
        _log.exception("an action repeated by the clock failed; it is not run again")
        return None


class Stopwatch:
    """For how long something has been so."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s: float | None = None

    @property
    def running(self) -> bool:
        """Whether it is so."""
        return self._since_s is not None

    @property
    def elapsed_s(self) -> float | None:
        """For how long; None while it is not."""
        return None if self._since_s is None else self._clock.now() - self._since_s

    def start(self) -> bool:
        """It is so from now on; False if it has been already."""
        fresh = self._since_s is None
        if fresh:
            self._since_s = self._clock.now()
        return fresh

    def stop(self) -> bool:
        """It is so no more; False if it was not."""
        was, self._since_s = self._since_s is not None, None
        return was

    def again(self, every_s: float) -> bool:
        """Whether it was not so, or has been for so long; if so, it counts from now on."""
        due = self.start() or self.past(every_s)
        if due:
            self.stop()
            self.start()
        return due

    def past(self, limit_s: float) -> bool:
        """Whether it has been so for too long."""
        return (self.elapsed_s or 0.0) > limit_s
