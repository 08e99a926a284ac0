"""A background writer for terminals and files that may block: a bounded queue and one thread.

A terminal that nobody reads, or a network file system that hangs, blocks the thread that writes to
it. So threads that must not block hand their bytes to a `Writer`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable

LIMIT_BYTES = 4 << 20
STUCK_S = 10.0
"""A write that takes longer counts as stuck: bytes that do not fit meanwhile are dropped."""
FLUSH_S = 5.0
"""`flush` gives up after this long without progress."""
LONGEST_FLUSH_S = 30.0
"""`flush` gives up after this long in any case."""


class Writer:
    """A queue of writes, and the thread that makes them; the first `put` starts it."""

    def __init__(self, name: str, *, limit_bytes: int = LIMIT_BYTES) -> None:
        """No thread runs before the first `put`."""
        self._name = name
        self._limit_bytes = limit_bytes
        # Reentrant: a signal handler may call `put` while this thread does.
        self._changed = threading.Condition(threading.RLock())
        self._held: deque[tuple[Callable[[bytes], object], bytes]] = deque()
        self._held_bytes = 0
        self._written = 0
        self._since_s: float | None = None
        self._thread: threading.Thread | None = None

    @property
    def full(self) -> bool:
        """Whether the queue has reached its limit."""
        return self._held_bytes >= self._limit_bytes

    @property
    def stuck(self) -> bool:
        """Whether a write has been in progress for longer than `STUCK_S`."""
        since_s = self._since_s  # once: the writer's thread changes it without this lock
        return since_s is not None and time.monotonic() - since_s > STUCK_S

    @property
    def should_wait(self) -> bool:
        """Whether a caller that can wait should: the queue is full, and not stuck."""
        return self.full and not self.stuck

    def put(self, write: Callable[[bytes], object], data: bytes) -> bool:
        """Queue `write(data)` for the thread; False if the queue is full: the bytes are dropped.

        A call without data needs no room: a file's close is queued behind its last bytes.
        """
        with self._changed:
            if data and self.full:
                return False
            if self._thread is None:
                # First: what a signal handler puts while it starts must not start a second one.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # no thread can start any more: better blocking than never
                    self._thread = None
                    write(data)
                    return True
            self._held.append((write, data))
            self._held_bytes += len(data)
            self._changed.notify_all()
        return True

    def flush(self, patience_s: float = FLUSH_S) -> bool:
        """Wait until all is written; False: no progress for `patience_s`, or `LONGEST_FLUSH_S`."""
        deadline_s = time.monotonic() + LONGEST_FLUSH_S
        # By the number of writes: others may add to the queue, whose length then says nothing.
        before = self._written

        def has_progressed() -> bool:
            return self._written > before

        with self._changed:
            while self._held and time.monotonic() < deadline_s:
                before = self._written
                if not self._changed.wait_for(has_progressed, patience_s):
                    return False
            return not self._held

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._held)
                write, data = self._held[0]  # it stays there, and counts, until it is written
                self._since_s = time.monotonic()
            with contextlib.suppress(Exception):  # `write` itself logs its failure
                write(data)
            with self._changed:
                self._held.popleft()
                self._held_bytes -= len(data)
                self._written += 1
                self._since_s = None
                self._changed.notify_all()
