"""One thread that waits for all of an agent's file descriptors.

The pipes of the workers' output, the nursery's socket and the workers' message sockets are
registered with a callback that reads them. Callbacks run on the hub's thread and must not
block; what the agent has to decide about goes to its inbox as an event.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
from collections.abc import Callable

log = logging.getLogger("zero")


class Hub:
    """A selector on a daemon thread; `add` and `remove` may be called from any thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._todo: list[Callable[[], None]] = []
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._woken)
        self._open = True
        self._thread = threading.Thread(target=self._run, name="zero-hub", daemon=True)
        self._thread.start()

    def add(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Call `on_readable` whenever `fd` can be read or has reached its end."""

        def watch() -> None:
            self._selector.register(fd, selectors.EVENT_READ, on_readable)

        self._later(watch)

    def remove(self, fd: int, then: Callable[[], None] = lambda: None) -> None:
        """Stop watching `fd`; `then`, normally its close, runs when that is certain."""

        def forget() -> None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(fd)
            then()

        if threading.current_thread() is self._thread:
            forget()  # at once: the end of a file stays readable until then
        else:
            self._later(forget)

    def close(self, timeout_s: float = 2.0) -> None:
        """End the thread after what has been asked of it so far."""
        self._later(self._stop)
        self._thread.join(timeout_s)

    def _later(self, job: Callable[[], None]) -> None:
        with self._lock:  # held for the wake-up too: the job may be the last, which closes the pipe
            self._todo.append(job)
            with contextlib.suppress(BlockingIOError):  # a full pipe wakes the thread as well
                os.write(self._wake_write, b".")

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        with self._lock:
            jobs, self._todo = self._todo, []
        for job in jobs:
            job()

    def _stop(self) -> None:
        self._open = False

    def _run(self) -> None:
        while self._open:
            for key, _ in self._selector.select():
                if self._selector.get_map().get(key.fd) is not key:
                    continue  # removed by a callback of this very batch
                try:
                    key.data()
                except Exception:
                    log.exception("zero-agent: internal error while reading fd %s", key.fd)
                    self._selector.unregister(key.fd)
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
