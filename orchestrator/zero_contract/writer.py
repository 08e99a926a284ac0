"""Bytes on their way to a terminal or a file that may stand still, on a thread of their own.

A terminal that nobody reads, or a network file system that does not answer, blocks whoever writes
to it. So threads that must go on hand their bytes to a `Writer`, which holds a bounded number of
them.

Must always hold: `put` returns at once; bytes of one writer are written in the order in which they
were put; no more than the limit is held. Who calls it: the agent's output, log and journal.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable

LIMIT_BYTES = 4 << 20
STUCK_S = 10.0
"""A write that takes longer will not end soon: what does not fit meanwhile is dropped."""
FLUSH_S = 5.0
"""At an end: so long without any progress is given up..."""
LONGEST_FLUSH_S = 30.0
"""...and so is the rest after this."""


class Writer:
    """One thread, started by the first bytes, and what it has yet to write."""

    def __init__(self, name: str, *, limit_bytes: int = LIMIT_BYTES) -> None:
        """Nothing runs before the first `put`."""
        self._name = name
        self._limit_bytes = limit_bytes
        # Reentrant: a signal handler may put something while this thread does.
        self._changed = threading.Condition(threading.RLock())
        self._held: deque[tuple[Callable[[bytes], object], bytes]] = deque()
        self._held_bytes = 0
        self._written = 0
        self._since_s: float | None = None
        self._thread: threading.Thread | None = None

    @property
    def full(self) -> bool:
        """Nothing more fits."""
        return self._held_bytes >= self._limit_bytes

    @property
    def stuck(self) -> bool:
        """A write has been under way for too long."""
        since_s = self._since_s
        return since_s is not None and time.monotonic() - since_s > STUCK_S

    @property
    def should_wait(self) -> bool:
        """Who can wait should: nothing fits now, and something will."""
        return self.full and not self.stuck

    def put(self, write: Callable[[bytes], object], data: bytes) -> bool:
        """Have `write(data)` called on the thread; False if there is no room, and it is dropped.

        Without data, room is not needed: so a file is closed after what was written to it.
        """
        with self._changed:
            if data and self.full:
                return False
            if not self._runs():
                write(data)  # there are no threads any more: better late than not at all
                return True
            self._held.append((write, data))
            self._held_bytes += len(data)
            self._changed.notify_all()
        return True

    def flush(self, patience_s: float = FLUSH_S) -> bool:
        """Wait until everything is written; False if nothing was for so long, or it takes long."""
        deadline_s = time.monotonic() + LONGEST_FLUSH_S
        with self._changed:
            while self._held and time.monotonic() < deadline_s:
                if not self._progresses(self._written, patience_s):
                    return False
            return not self._held

    def _progresses(self, written: int, patience_s: float) -> bool:
        return self._changed.wait_for(lambda: self._written > written, patience_s)

    def _runs(self) -> bool:
        """Start the thread, if that has not been done; False if there can be none."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._held)
                write, data = self._held[0]
                self._since_s = time.monotonic()
            with contextlib.suppress(Exception):  # `write` itself says what it could not
                write(data)
            with self._changed:
                self._held.popleft()
                self._held_bytes -= len(data)
                self._written += 1
                self._since_s = None
                self._changed.notify_all()
