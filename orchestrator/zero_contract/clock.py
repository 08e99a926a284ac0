"""Monotonic time for the orchestrator: each component gets its clock as an argument.

`SystemClock` runs each repeated action on a daemon thread; the tests' `ManualClock` runs it when
the test advances the time, so a simulation of a thousand nodes covers hours within seconds,
deterministically. No decision reads the wall clock, and no two nodes compare their clocks (the
leases of the store are the shared clock).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

_log = logging.getLogger(__name__)

Action = Callable[[], float | None]
"""Does something; returns the seconds until it is due again, or None for never."""

_JOIN_S = 1.0
"""How long `cancel` waits for an action that is running."""
_START_TICKS = 19
"""Index of `starttime` in `/proc/self/stat` after the name: proc_pid_stat(5)."""


def process_age_s(proc: Path = Path("/proc/self")) -> float:
    """Seconds since the start of this process; 0 if the kernel does not say."""
    try:
        # After the last bracket: the name of the program, in brackets, may contain any character.
        fields = (proc / "stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[_START_TICKS]) / os.sysconf("SC_CLK_TCK")
        # The kernel counts from the boot, with the time in which the machine was suspended.
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    except (OSError, ValueError, IndexError):
        return 0.0


def wait_until(happened: Callable[[], bool], limit_s: float, poll_s: float = 0.05) -> bool:
    """Return when it has happened, at the latest after the limit; whether it has."""
    deadline = time.monotonic() + limit_s
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True


class Repeating(Protocol):
    """An action that is being repeated."""

    def cancel(self) -> None:
        """Never run the action again; waits briefly for one in progress. The action may call it."""


class Clock(Protocol):
    """A monotonic clock."""

    def now(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""

    def repeat(self, action: Action, after_s: float) -> Repeating:
        """Run `action` after `after_s` seconds, and again after the seconds that it returns."""


class SystemClock:
    """This machine's monotonic clock."""

    def now(self) -> float:
        """Seconds, as `time.monotonic`."""
        return time.monotonic()

    def repeat(self, action: Action, after_s: float) -> Repeating:
        """Run `action` on a new daemon thread."""
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
        if threading.current_thread() is not self._thread:  # the action may cancel itself
            self._thread.join(_JOIN_S)


def run_logged(action: Action) -> float | None:
    """Run an action once; an exception is logged, and ends the action's repetition alone."""
    try:
        return action()
    except Exception:
        _log.exception("an action repeated by the clock failed; the clock does not run it again")
        return None


class Stopwatch:
    """Measures for how long a condition has held."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s: float | None = None

    @property
    def running(self) -> bool:
        """Whether the condition holds."""
        return self._since_s is not None

    @property
    def elapsed_s(self) -> float | None:
        """Seconds since the condition began; None while it does not hold."""
        return None if self._since_s is None else self._clock.now() - self._since_s

    def start(self) -> bool:
        """The condition holds from now on; False if it held already."""
        fresh = self._since_s is None
        if fresh:
            self._since_s = self._clock.now()
        return fresh

    def stop(self) -> bool:
        """The condition holds no longer; False if it did not hold."""
        was, self._since_s = self._since_s is not None, None
        return was

    def again(self, every_s: float) -> bool:
        """Start anew if the watch was stopped, or has run for `every_s`; returns whether it has."""
        due = self.start() or self.past(every_s)
        if due:
            self.stop()
            self.start()
        return due

    def past(self, limit_s: float) -> bool:
        """Whether the condition has held for more than `limit_s` seconds."""
        return (self.elapsed_s or 0.0) > limit_s
