"""Standing still until an exchange has ended, and getting away when there is no point in it.

Owns the thread that waits in the transport's stead. Must always hold:

- The caller waits in Python, never inside the transport: an interrupt ends the wait within
  milliseconds, and so does a signal (Ctrl-C), though a silent peer keeps the transport for ever.
- An interrupt is for good: a group that is left is not waited for again.
- What is abandoned is kept for ever, the group with it: the transport may still write into the
  buffers, and the end of a gloo group waits for its exchanges, at the end of the process, too.

The thread is needed because gloo can neither abort an exchange nor say of a receive whether it
has come. A GPU's exchanges are waited for by its stream, which holds nobody up.

Used by `collectives`; `elastic` interrupts.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

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


class _Job:
    """Exchanges that the thread waits for."""

    def __init__(self, works: Sequence[dist.Work], changed: threading.Condition) -> None:
        self.works = works
        self.ended = False
        self.error: BaseException | None = None
        self._changed = changed

    def run(self) -> None:
        try:
            for work in self.works:
                work.wait()
        except BaseException as error:
            self.error = error
        with self._changed:
            self.ended = True
            self._changed.notify_all()


class Waiter:
    """Waits for the exchanges of one group."""

    def __init__(self, group: Any, interrupt: Interrupt | None = None) -> None:
        self.interrupt = interrupt or Interrupt()
        self._group = group
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def wait(self, works: Sequence[dist.Work], look: Callable[[], None]) -> bool:
        """Stand still until all have ended, or until there is an interrupt.

        Args:
            works: What to wait for; on the CPU.
            look: Called every LOOK_S of the wait; what it raises ends the wait.

        Returns:
            False if it was interrupted. Raises what the transport raises.
        """
        if all(work.is_completed() for work in works):
            for work in works:  # an exchange that failed has also ended
                work.wait()
            return not self.interrupt.reason
        job = _Job(works, self.interrupt.changed)
        self._begin(job)
        try:
            self._stand_still(job, look)
        finally:
            if not job.ended:
                _keep_for_ever(job, self._group)
        if job.error is not None:
            raise job.error
        return job.ended

    def _begin(self, job: _Job) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._jobs,), daemon=True)
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        self._jobs.put(job)

    def _stand_still(self, job: _Job, look: Callable[[], None]) -> None:
        interrupt = self.interrupt
        while True:
            with interrupt.changed:
                if interrupt.changed.wait_for(lambda: job.ended or interrupt.reason, LOOK_S):
                    return
            look()


def _serve(jobs: SimpleQueue[_Job | None]) -> None:
    """The thread: one job after the other, until None."""
    while (job := jobs.get()) is not None:
        job.run()
        del job  # it holds buffers


def _keep_for_ever(*things: Any) -> None:
    """Let nothing destroy these, not even the end of the interpreter."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
