"""Waits for exchanges that can be interrupted, and the meaning of a transport's errors.

The caller waits in Python, never inside the transport: an interrupt ends the wait within
milliseconds, and so does a signal (Ctrl-C), though a silent peer blocks the transport for ever. A
thread waits inside, because gloo can neither abort an exchange nor test whether a receive has
completed. A GPU's exchanges are waited for by its stream, which blocks no thread.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from queue import SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist

from zero_contract.errors import ConfigError, PeerLost


class Cause(StrEnum):
    """The meaning of an error of a transport."""

    PEER = "peer"
    """A peer is lost: a symptom, whose cause is on another host."""
    OWN = "own"
    """This host or its device failed, whoever the peers are: the transport's words name it."""
    ONE_DEVICE = "one device"
    """Two ranks use one device."""


_LOST = (
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETRESET,
    errno.ENETUNREACH,
    errno.ENOTCONN,
    errno.EPIPE,
    errno.ESHUTDOWN,
    errno.ETIMEDOUT,
)
"""What the kernel says of a connection that is lost; gloo passes on its words."""
_CAUSES: tuple[tuple[str, Cause], ...] = (
    ("duplicate gpu", Cause.ONE_DEVICE),
    # Of NCCL and CUDA on this host. They come first: NCCL adds advice about peers to any of them.
    ("cuda failure", Cause.OWN),
    ("cuda error:", Cause.OWN),
    ("unhandled cuda error", Cause.OWN),
    ("ncclinvalidargument", Cause.OWN),
    ("ncclinvalidusage", Cause.OWN),
    ("out of memory", Cause.OWN),
    ("shared memory segment", Cause.OWN),
    # Of gloo (a plain RuntimeError) and NCCL about a broken connection.
    ("application timeout caused pair closure", Cause.PEER),
    ("connection closed", Cause.PEER),
    ("connect timeout", Cause.PEER),
    ("network error", Cause.PEER),
    ("remote process exited", Cause.PEER),
    ("socket closed", Cause.PEER),
    ("socket timeout", Cause.PEER),
    ("timed out waiting", Cause.PEER),
    *((os.strerror(number).lower(), Cause.PEER) for number in _LOST),
    # A check inside of NCCL, with no word of a connection.
    ("ncclinternalerror", Cause.OWN),
)
"""The first text that is part of an error's, in lower case, names its cause."""
_GLOO = "/gloo/"
"""gloo begins each message with the line of its source that raises it."""
_ONE_EACH = (
    "two ranks use one device, which NCCL refuses: start at most as many workers on a node as it "
    "has devices (--nproc-per-node), and show each of them another one (CUDA_VISIBLE_DEVICES); or "
    'let the script call init_process_group("cpu:gloo,cuda:gloo"), which is slow'
)
_NOISE = re.compile(r"\[\S+\.(cc|h|cpp):\d+\] |\. This is typically caused by.*", re.DOTALL)
"""A line of gloo's source, and its advice to look at the logs of a worker that is lost."""


def cause_of(error: RuntimeError, *, of_script: bool) -> Cause:
    """The meaning of an error that came out of a call of the transport.

    `of_script`: code of the script ran in that call as well.
    """
    text = str(error).lower()
    # A script's own errors may have any text: only torch's classes and gloo's form count then.
    if of_script and not (isinstance(error, dist.DistError) or _GLOO in text):
        return Cause.OWN
    otherwise = Cause.PEER if isinstance(error, dist.DistError) else Cause.OWN
    return next((cause for sign, cause in _CAUSES if sign in text), otherwise)


@contextmanager
def transport_failures(what: str, *, of_script: bool = False) -> Iterator[None]:
    """Turn the error of a broken connection into PeerLost, which names the exchange.

    See `cause_of`.

    Raises:
        PeerLost: The connection is broken.
        ConfigError: NCCL refuses a device that two ranks use.
    """
    try:
        yield
    except RuntimeError as error:
        match cause_of(error, of_script=of_script):
            case Cause.ONE_DEVICE:
                raise ConfigError(f"{what}: {_ONE_EACH}") from error
            case Cause.PEER:
                text = _NOISE.sub("", str(error))
                raise PeerLost(f"{what}: a peer is gone: {text}") from error
            case Cause.OWN:
                raise


LOOK_S = 3.0
"""The interval at which a wait checks for a deadlock."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3
"""Between two questions to a device: a step must not wait for the host, nor a wait use a core."""


class Interrupt:
    """A request, from any thread, that this rank stop waiting for its peers."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.reason = ""
        """The reason; empty as long as there is no request."""
        self.fills_forward = False
        """Whether `fills` holds: a forward runs."""
        self.fills_backward = False
        """Whether `fills` holds within a backward; one that has failed leaves this on."""
        self.lost: PeerLost | None = None
        """How the step under way lost a peer, if this process goes on all the same."""

    @property
    def fills(self) -> bool:
        """Whether an exchange that loses a peer ends well, as all after it do, with zeros.

        They stand for what has not come, in a step that will have no effect.
        """
        backward = self.fills_backward and torch._C._current_graph_task_id() != -1
        return self.fills_forward or backward

    def covers(self, error: PeerLost) -> bool:
        """Whether exchanges go on in spite of this loss; then it is noted."""
        if fills := self.fills:
            self.lost = self.lost or error
        return fills

    def request(self, reason: str) -> None:
        """End every wait, now and later."""
        with self.changed:
            # Final, and the first reason stays: a group that is left is not waited for again.
            self.reason = self.reason or reason
            self.changed.notify_all()


class Work(Protocol):
    """An exchange under way."""

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""

    def wait(self) -> object:
        """Block until it has ended; raises what the transport raises."""


class Watched:
    """An exchange whose end is notified: no thread has to wait for it."""

    def __init__(self, changed: threading.Condition) -> None:
        self._ended = False
        self._error: BaseException | None = None
        self._changed = changed

    def end(self, error: BaseException | None = None) -> None:
        """Notify the end of the exchange, once."""
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
        """Block until it has ended; raises its error."""
        with self._changed:
            self._changed.wait_for(self.is_completed)
        if self._error is not None:
            raise self._error


class _Job(Watched):
    """Exchanges that the waiting thread waits for."""

    def __init__(self, works: Sequence[Work], changed: threading.Condition) -> None:
        super().__init__(changed)
        self._works = works

    def work(self) -> None:
        for work in self._works:
            work.wait()

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:  # whoever waits for it raises it
            self.end(error)
        else:
            self.end()


class _Chain(_Job):
    """Exchanges, and others that begin when those have ended."""

    def __init__(
        self,
        works: Sequence[Work],
        begin_next: Callable[[], Sequence[Work]],
        changed: threading.Condition,
    ) -> None:
        super().__init__(works, changed)
        self._begin_next = begin_next

    def work(self) -> None:
        super().work()
        self._works = self._begin_next()
        super().work()


class _Line:
    """A thread, from the first job on, that runs one job after the other."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, job: _Job) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._jobs,), daemon=True)
            self._thread.start()
            # The thread holds the queue alone, so it ends with this object.
            weakref.finalize(self, self._jobs.put, None)
        self._jobs.put(job)


class Waiter:
    """Waits for the exchanges of one group."""

    def __init__(
        self, group: Any, interrupt: Interrupt | None = None, timeout_s: float = math.inf
    ) -> None:
        """Wait for exchanges of `group`, for each `timeout_s` at most."""
        self.interrupt = interrupt or Interrupt()
        self._timeout_s = timeout_s
        self._group = group
        self._waits, self._chains = _Line(), _Line()

    def watch(self, works: Sequence[Work]) -> list[Watched]:
        """Exchanges whose end is known without a wait: the thread waits for them, in this order."""
        # gloo does not say of a send or a receive whether it has ended until somebody waits for it.
        watched = [work for work in works if isinstance(work, Watched)]
        if others := [work for work in works if not isinstance(work, Watched)]:
            job = _Job(others, self.interrupt.changed)
            self._waits.put(job)
            watched.append(job)
        return watched

    def chain(
        self,
        works: Sequence[Work],
        begin_next: Callable[[], Sequence[Work]],
        *,
        in_order: bool = False,
    ) -> Watched:
        """Begin further exchanges when some have ended; nobody has to wait for that.

        `in_order`: chains end in the order of these calls.
        """
        job = _Chain(works, begin_next, self.interrupt.changed)
        if in_order:  # exchanges are matched by their order: one thread for all chains
            self._chains.put(job)
        else:
            # One for each: what others have not begun then keeps no other chain waiting.
            threading.Thread(target=job.run, daemon=True).start()
        return job

    def wait(self, works: Sequence[Work], look: Callable[[], None]) -> bool:
        """Block until exchanges on the CPU have ended, or (False) an interrupt.

        `look` is called every LOOK_S. What it raises ends the wait, as what the transport raises.
        """
        if all(work.is_completed() for work in works):  # also those that have failed
            for work in works:
                work.wait()
            return not self.interrupt.reason
        watched = self.watch(works)
        try:
            self._wait_until_settled(watched, look)
        finally:
            if not _ended(watched):
                # The transport may still write into the buffers, and a gloo group that is destroyed
                # waits for its exchanges: not even the end of the interpreter may do that.
                for kept in (watched, self._group):
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        for each in watched:
            if each.is_completed():
                each.wait()
        return _ended(watched)

    def poll(self, reached: Callable[[], bool], look: Callable[[], None]) -> bool:
        """Block until a device has reached something, or (False) an interrupt.

        `reached` is asked again and again, so it must not block; `look` is as for `wait`. Raises
        RuntimeError after the timeout.
        """
        begun = looked = time.monotonic()
        pause_s = _SHORTEST_PAUSE_S
        while not reached():
            with self.interrupt.changed:
                if self.interrupt.reason:
                    return False
                self.interrupt.changed.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            now = time.monotonic()
            if now - begun > self._timeout_s:
                raise RuntimeError(f"timed out waiting for {self._timeout_s:g} s")
            if now - looked > LOOK_S:
                look()
                looked = now
        return not self.interrupt.reason

    def _wait_until_settled(self, watched: Sequence[Watched], look: Callable[[], None]) -> None:
        def settled() -> bool:
            # One failure is enough: the others may never end.
            failed = any(work.failed for work in watched)
            return failed or _ended(watched) or bool(self.interrupt.reason)

        begun = time.monotonic()
        while True:
            with self.interrupt.changed:
                if self.interrupt.changed.wait_for(settled, LOOK_S):
                    return
            look()
            if time.monotonic() - begun > self._timeout_s:
                raise RuntimeError(f"timed out waiting for {self._timeout_s:g} s")


def _ended(watched: Sequence[Watched]) -> bool:
    return all(work.is_completed() for work in watched)


def _serve(jobs: SimpleQueue[_Job | None]) -> None:
    """The waiting thread: run one job after the other, until None."""
    while (job := jobs.get()) is not None:
        job.run()
        del job  # it holds buffers
