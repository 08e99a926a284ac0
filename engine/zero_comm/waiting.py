"""Standing still until an exchange has ended, and getting away when there is no point in it.

Owns the thread that waits in the transport's stead. Must always hold:

- The caller waits in Python, never inside the transport: an interrupt ends the wait within
  milliseconds, and so does a signal (Ctrl-C), though a silent peer keeps the transport for ever.
- An interrupt is for good: a group that is left is not waited for again.
- What is abandoned is kept for ever, the group with it: the transport may still write into the
  buffers, and the end of a gloo group waits for its exchanges, at the end of the process, too.

The thread is needed because gloo can neither abort an exchange nor say of a receive whether it
has come. A GPU's exchanges are waited for by its stream, which holds nobody up.

What a transport raises when a peer is gone is told from mistakes of the program here as well.

Used by `collectives` and `distributed`; the agent link interrupts.
"""

from __future__ import annotations

import ctypes
import math
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Protocol

import torch.distributed as dist

from zero_contract.errors import PeerLost

# How gloo (a plain RuntimeError) and NCCL say that a connection, not the program, is broken.
_SIGNS = (
    "application timeout caused pair closure",
    "broken pipe",
    "connection closed",
    "connection refused",
    "connection reset",
    "connect timeout",
    "network error",
    "remote process exited",
    "socket closed",
    "socket timeout",
    "timed out waiting",
)
_NOISE = re.compile(r"\[\S+\.(cc|h|cpp):\d+\] |\. This is typically caused by.*", re.DOTALL)
"""Where in gloo's source it happened, and its advice: to look at logs of a worker that is gone."""


@contextmanager
def transport_failures(what: str) -> Iterator[None]:
    """Raise PeerLost, which names what was being done, for a broken connection."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).lower()
        if not isinstance(error, dist.DistError) and not any(sign in text for sign in _SIGNS):
            raise
        raise PeerLost(f"{what}: a peer is gone: {_NOISE.sub('', str(error))}") from error


LOOK_S = 3.0
"""How long a wait lasts before somebody looks at what the others are doing, each time."""


class Interrupt:
    """A wish, from any thread, that this rank stop waiting for its peers."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.reason = ""
        """Why; empty as long as nobody wants it."""

    def request(self, reason: str) -> None:
        """End every wait, now and later."""
        with self.changed:
            self.reason = self.reason or reason
            self.changed.notify_all()


class Work(Protocol):
    """An exchange under way."""

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""

    def wait(self) -> object:
        """Stand still until it has ended; raises what the transport raises."""


class Watched:
    """An exchange whose end somebody tells: no thread has to wait for it."""

    def __init__(self, changed: threading.Condition) -> None:
        self._ended = False
        self._error: BaseException | None = None
        self._changed = changed

    def end(self, error: BaseException | None = None) -> None:
        """Tell it, once."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return self._ended

    @property
    def failed(self) -> bool:
        """Whether it has ended in an error."""
        return self._error is not None

    def wait(self) -> None:
        """Stand still until it has ended; raises what went wrong."""
        with self._changed:
            self._changed.wait_for(self.is_completed)
        if self._error is not None:
            raise self._error


class _Job(Watched):
    """Exchanges that the thread waits for."""

    def __init__(self, works: Sequence[Work], changed: threading.Condition) -> None:
        super().__init__(changed)
        self._works = works

    def run(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except BaseException as error:
            self.end(error)
        else:
            self.end()


class Waiter:
    """Waits for the exchanges of one group."""

    def __init__(
        self, group: Any, interrupt: Interrupt | None = None, timeout_s: float = math.inf
    ) -> None:
        """Wait for exchanges of `group`, for each `timeout_s` at most."""
        self.interrupt = interrupt or Interrupt()
        self._timeout_s = timeout_s
        self._group = group
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def wait(self, works: Sequence[Work], look: Callable[[], None]) -> bool:
        """Stand still until all have ended, or until there is an interrupt.

        Args:
            works: What to wait for; on the CPU.
            look: Called every LOOK_S of the wait; what it raises ends the wait.

        Returns:
            False if it was interrupted. Raises what the transport raises.
        """
        told = [work for work in works if isinstance(work, Watched)]
        others = [work for work in works if not isinstance(work, Watched)]
        if all(work.is_completed() for work in works):
            for work in works:  # an exchange that failed has also ended
                work.wait()
            return not self.interrupt.reason
        if others:
            told.append(self._begin(others))
        try:
            self._stand_still(told, look)
        finally:
            if not _ended(told):
                # Not even the end of the interpreter may destroy these.
                for kept in (told, self._group):
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        for work in told:
            if work.is_completed():
                work.wait()
        return _ended(told)

    def _begin(self, works: Sequence[Work]) -> Watched:
        """Let the thread wait for these."""
        job = _Job(works, self.interrupt.changed)
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._jobs,), daemon=True)
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        self._jobs.put(job)
        return job

    def _stand_still(self, told: Sequence[Watched], look: Callable[[], None]) -> None:
        def settled() -> bool:
            failed = any(work.failed for work in told)
            return failed or _ended(told) or bool(self.interrupt.reason)

        begun = time.monotonic()
        while True:
            with self.interrupt.changed:
                if self.interrupt.changed.wait_for(settled, LOOK_S):
                    return
            look()
            if time.monotonic() - begun > self._timeout_s:
                raise RuntimeError(f"timed out waiting for {self._timeout_s:g} s")


def _ended(told: Sequence[Watched]) -> bool:
    return all(work.is_completed() for work in told)


def _serve(jobs: SimpleQueue[_Job | None]) -> None:
    """The thread: one job after the other, until None."""
    while (job := jobs.get()) is not None:
        job.run()
        del job  # it holds buffers
