"""One thread that waits for all file descriptors of an agent, or of another launcher.

The pipes of the workers' output, the forkserver's socket and the workers' message sockets are
registered with a callback that reads them. Callbacks run on the hub's thread and must not block. A
descriptor is watched until it is removed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from socket import socket

log = logging.getLogger("zero")

EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of a process that is out of file descriptors or socket memory."""

FIRST_PAUSE_S = 0.1
"""First pause after a callback has raised; the pause doubles with each failure in a row."""
LONGEST_PAUSE_S = 2.0
"""Upper limit of that exponential backoff."""


@dataclass
class _Listener:
    """One descriptor that is watched, or will be again."""

    on_readable: Callable[[], None]
    pause_s: float = 0.0
    """The last pause after a failure; 0: the callback works."""
    due_s: float | None = None
    """When the descriptor is watched again; None: it is being watched."""


class Hub:
    """A selector on a daemon thread; `add` and `remove` may be called from any thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._todo: list[Callable[[], None]] = []
        self._listeners: dict[int, _Listener] = {}
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._watch(self._wake_read, _Listener(self._woken))
        self._open = True
        self._thread = threading.Thread(target=self._run, name="zero-hub", daemon=True)
        self._thread.start()

    def add(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Call `on_readable` whenever `fd` is readable or has reached its end."""
        self._later(lambda: self._watch(fd, _Listener(on_readable)))

    def remove(self, file: int | socket, then: Callable[[], None] = lambda: None) -> None:
        """Stop watching a file; `then`, normally its close, runs once it is not watched."""

        def forget() -> None:
            # Asked for here: by now it may be closed, and its former number be another file's.
            fd = file if isinstance(file, int) else file.fileno()
            self._listeners.pop(fd, None)
            with contextlib.suppress(KeyError, ValueError):  # it pauses, or was closed
                self._selector.unregister(fd)
            then()

        # At once on its own thread: the end of a file stays readable until then. Never on another:
        # a descriptor that is closed under the selector may be another file's by its next turn.
        if threading.current_thread() is self._thread:
            forget()
        else:
            self._later(forget)

    def pause(self, fd: int, seconds: float) -> None:
        """Do not watch `fd` for this time; to be called by the callback of `fd`."""
        listener = self._listeners[fd]
        with contextlib.suppress(KeyError):  # it has paused, and raised behind that
            self._selector.unregister(fd)
        listener.due_s = time.monotonic() + seconds

    @property
    def pauses(self) -> bool:
        """Whether readable data waits because of a call of `pause`."""
        found = list(self._listeners.values())
        return any(one.due_s is not None and not one.pause_s for one in found)

    def close(self, timeout_s: float = 2.0) -> None:
        """End the thread after all calls of `add` and `remove` so far."""

        def stop() -> None:
            self._open = False

        self._later(stop)
        self._thread.join(timeout_s)

    def _later(self, job: Callable[[], None]) -> None:
        with self._lock:  # held for the wake-up too: the job may be the last, which closes the pipe
            self._todo.append(job)
            if self._wake_write >= 0:
                with contextlib.suppress(BlockingIOError):  # a full pipe wakes the thread as well
                    os.write(self._wake_write, b".")
                return
        self._work()  # the thread has ended

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        self._work()

    def _work(self) -> None:
        with self._lock:
            jobs, self._todo = self._todo, []
        for job in jobs:
            try:
                job()
            except Exception:
                log.exception("zero-agent: internal error in the thread that reads")

    # ---- the thread ----

    def _run(self) -> None:
        while self._open:
            due = [one.due_s for one in self._listeners.values() if one.due_s is not None]
            timeout_s = max(0.0, min(due) - time.monotonic()) if due else None
            for key, _ in self._selector.select(timeout_s):
                listener = self._listeners.get(key.fd)
                # A callback before this one may have removed it, and its number be another's.
                if listener is key.data and listener.due_s is None:
                    self._call(key.fd, listener)
            now_s = time.monotonic()
            for fd, listener in list(self._listeners.items()):  # those whose pause is over
                if listener.due_s is not None and listener.due_s <= now_s:
                    listener.due_s = None
                    try:
                        self._selector.register(fd, selectors.EVENT_READ, listener)
                    except (OSError, ValueError) as error:  # closed without `remove`
                        del self._listeners[fd]
                        log.error("zero-agent: fd %d is read no more: %s", fd, error)
        with self._lock:
            self._selector.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_write = -1  # the number is another file's from now on
        self._work()

    def _watch(self, fd: int, listener: _Listener) -> None:
        self._selector.register(fd, selectors.EVENT_READ, listener)
        self._listeners[fd] = listener

    def _call(self, fd: int, listener: _Listener) -> None:
        try:
            listener.on_readable()
        except Exception as error:
            if self._listeners.get(fd) is not listener:  # the callback has removed itself
                return
            if not listener.pause_s:
                what = f"internal error: {error!r}"
                if isinstance(error, OSError) and error.errno in EXHAUSTED:
                    what = f"{error.strerror}: raise the limit (ulimit -n, LimitNOFILE=)"
                log.error("zero-agent: fd %d: %s; trying again", fd, what, exc_info=error)
            # Called again: a process that is out of descriptors may have some soon. The descriptor
            # stays readable: without a pause the thread would spin on it.
            listener.pause_s = min(max(FIRST_PAUSE_S, 2 * listener.pause_s), LONGEST_PAUSE_S)
            self.pause(fd, listener.pause_s)
        else:
            listener.pause_s = 0.0
