"""The parts of Python's standard library that wait, measure time or draw numbers, on a `Kernel`.

`installed` puts them in the place of `threading`, `queue`, `time`, `random`, `secrets` and the
thread pools of `concurrent.futures` in every module of the product. The product then runs
unchanged, its own `SystemClock` too: a thread is a task, and a wait takes simulated time alone.
"""

from __future__ import annotations

import concurrent.futures as real_futures
import contextlib
import importlib
import queue as real_queue
import random as real_random
import secrets as real_secrets
import sys
import threading as real_threading
import time as real_time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.simulation.kernel import Kernel, Task

EPOCH_S = 1_750_000_000.0
"""The time of day at which a simulation begins."""
PACKAGES = {
    "zero_agent",
    "zero_orchestrator",
    "zero_contract",
    "zero_comm",
    "zero_checkpoint",
    "zero_step",
    "tenacity",
}


def standard_library(kernel: Kernel) -> dict[str, Any]:
    """The simulated modules, by the names of the real ones."""
    return {
        "threading": _threading(kernel),
        "queue": _queue(kernel),
        "time": _time(kernel),
        "random": kernel.random("product"),
        "secrets": _secrets(kernel),
        "Future": partial(Future, kernel),
        "ThreadPoolExecutor": partial(Executor, kernel),
    }


REAL: dict[str, Any] = {
    "threading": real_threading,
    "queue": real_queue,
    "time": real_time,
    "random": real_random,
    "secrets": real_secrets,
    "Future": real_futures.Future,
    "ThreadPoolExecutor": real_futures.ThreadPoolExecutor,
}
"""Modules and classes, by the names under which the product has imported them."""


@contextlib.contextmanager
def installed(simulated: dict[str, Any]) -> Iterator[None]:
    """Let the modules of the product use the simulated modules, and their own again afterwards."""
    changed: list[tuple[ModuleType, str]] = []
    for module in [m for name, m in sys.modules.items() if name.partition(".")[0] in PACKAGES]:
        for name, real in REAL.items():
            if module.__dict__.get(name) is real:
                changed.append((module, name))
                setattr(module, name, simulated[name])
    try:
        yield
    finally:
        for module, name in changed:
            setattr(module, name, REAL[name])


@contextlib.contextmanager
def replaced(parts: dict[str, Any]) -> Iterator[None]:
    """Put something else in the place of some names of the product.

    Args:
        parts: By `module:name`, what the module finds under that name.
    """
    before: list[tuple[Any, str, Any]] = []
    for where, what in parts.items():
        path, _, name = where.partition(":")
        module = importlib.import_module(path)
        holder, _, attribute = name.rpartition(".")
        for part in filter(None, holder.split(".")):
            module = getattr(module, part)
        before.append((module, attribute, getattr(module, attribute)))
        setattr(module, attribute, what)
    try:
        yield
    finally:
        for module, attribute, was in reversed(before):
            setattr(module, attribute, was)


def _task(kernel: Kernel) -> Task:
    assert kernel.current is not None, "an event of the world has no thread"
    return kernel.current


def _time(kernel: Kernel) -> Any:
    def wall() -> float:
        offset_s = kernel.current.process.wall_offset_s if kernel.current else 0.0
        return EPOCH_S + kernel.now + offset_s

    def sleep(seconds: float) -> None:
        until_s = kernel.now + seconds
        while kernel.now < until_s:
            kernel.park(until_s - kernel.now)

    return SimpleNamespace(
        time=wall,
        time_ns=lambda: round(wall() * 1e9),
        monotonic=lambda: kernel.now,
        monotonic_ns=lambda: round(kernel.now * 1e9),
        perf_counter=lambda: kernel.now,
        sleep=sleep,
        strftime=real_time.strftime,
        gmtime=real_time.gmtime,
        localtime=real_time.gmtime,
    )


def _secrets(kernel: Kernel) -> Any:
    drawn = kernel.random("secrets")
    return SimpleNamespace(
        token_hex=lambda size=32: drawn.randbytes(size).hex(),
        token_bytes=lambda size=32: drawn.randbytes(size),
    )


# ---- threading ----


class Waiters:
    """The tasks that wait for something, in order."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._tasks: deque[Task] = deque()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until `wake`, or for this time; False if nobody has woken the task."""
        me = _task(self.kernel)
        self._tasks.append(me)
        woken = self.kernel.park(timeout_s)
        if me in self._tasks:
            self._tasks.remove(me)
        return woken

    def wait_until(self, true: Callable[[], Any], timeout_s: float | None = None) -> Any:
        """Wait until a condition holds, or for this time; the last value of the condition."""
        until_s = None if timeout_s is None else self.kernel.now + timeout_s
        while not (found := true()):
            left_s = None if until_s is None else until_s - self.kernel.now
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return found

    def wake(self, count: int | None = None) -> None:
        """Let the first tasks go on; None: all."""
        for _ in range(len(self._tasks) if count is None else min(count, len(self._tasks))):
            self.kernel.wake(self._tasks.popleft())


class Lock:
    """`threading.Lock` and `RLock`."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel, self._waiters = kernel, Waiters(kernel)
        self._holder: object = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = self._kernel.current or "world"
        while self._holder is not None and self._holder is not me:
            if not blocking or not self._waiters.wait(None if timeout < 0 else timeout):
                return False
        self._holder = me
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._holder = None
            self._waiters.wake(1)

    def release_all(self) -> int:
        """As `Condition.wait` does; returns how often it was held."""
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def acquire_all(self, depth: int) -> None:
        """The inverse."""
        self.acquire()
        self._depth = depth

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """`threading.Condition`."""

    def __init__(self, kernel: Kernel, lock: Lock | None = None) -> None:
        self._kernel, self._lock, self._waiters = kernel, lock or Lock(kernel), Waiters(kernel)
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        depth = self._lock.release_all()
        woken = self._waiters.wait(timeout)
        self._lock.acquire_all(depth)
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until_s = None if timeout is None else self._kernel.now + timeout
        while not (found := predicate()):
            left_s = None if until_s is None else until_s - self._kernel.now
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return found

    def notify(self, n: int = 1) -> None:
        self._waiters.wake(n)

    def notify_all(self) -> None:
        self._waiters.wake()


class Event:
    """`threading.Event`."""

    def __init__(self, kernel: Kernel) -> None:
        self._is_set, self._waiters = False, Waiters(kernel)

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._waiters.wake()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return bool(self._waiters.wait_until(self.is_set, timeout))


class Thread:
    """`threading.Thread`."""

    def __init__(
        self,
        kernel: Kernel,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str = "thread",
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name, self.daemon, self.ident = name, daemon, None
        self._kernel = kernel
        self._work = lambda: target and target(*args, **(kwargs or {}))
        self._task: Task | None = None

    @classmethod
    def current(cls, kernel: Kernel) -> Thread:
        return cls.of(kernel, kernel.current)

    @classmethod
    def main(cls, kernel: Kernel) -> Thread:
        return cls.of(kernel, kernel.current and kernel.current.process.tasks[0])

    @classmethod
    def of(cls, kernel: Kernel, task: Task | None) -> Thread:
        if task is None:  # an event of the world has no thread
            return cls(kernel)
        if task.thread is None:
            task.thread = cls(kernel)
            task.thread._task = task
        found: Thread = task.thread
        return found

    def start(self) -> None:
        me = _task(self._kernel)
        if not me.killed:
            self._task = self._kernel.spawn(me.process, self.name, self._work)
            self._task.thread = self

    def join(self, timeout: float | None = None) -> None:
        until_s = None if timeout is None else self._kernel.now + timeout
        while self._task is not None and not self._task.ended:
            left_s = None if until_s is None else until_s - self._kernel.now
            if left_s is not None and left_s <= 0:
                return
            self._task.joining.append(_task(self._kernel))
            self._kernel.park(left_s)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.ended

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thread) and self._task is not None and self._task is other._task

    __hash__ = object.__hash__


def _threading(kernel: Kernel) -> Any:
    return SimpleNamespace(
        Thread=partial(Thread, kernel),
        Lock=partial(Lock, kernel),
        RLock=partial(Lock, kernel),
        Condition=partial(Condition, kernel),
        Event=partial(Event, kernel),
        local=SimpleNamespace,  # tenacity makes one for each call
        get_ident=lambda: kernel.current.ident if kernel.current else 0,
        current_thread=partial(Thread.current, kernel),
        main_thread=partial(Thread.main, kernel),
    )


# ---- queue ----


class Queue:
    """`queue.Queue` and `SimpleQueue`."""

    def __init__(self, kernel: Kernel, maxsize: int = 0) -> None:
        self._maxsize = maxsize
        self._items: deque[Any] = deque()
        self._getting, self._putting = Waiters(kernel), Waiters(kernel)

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        def has_room() -> bool:
            return not self._maxsize or len(self._items) < self._maxsize

        if not self._putting.wait_until(has_room, timeout if block else 0.0):
            raise real_queue.Full
        self._items.append(item)
        self._getting.wake(1)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self._getting.wait_until(lambda: self._items, timeout if block else 0.0):
            raise real_queue.Empty
        self._putting.wake(1)
        return self._items.popleft()

    def put_nowait(self, item: Any) -> None:
        self.put(item, block=False)

    def get_nowait(self) -> Any:
        return self.get(block=False)


def _queue(kernel: Kernel) -> Any:
    made = partial(Queue, kernel)
    return SimpleNamespace(
        Queue=made, SimpleQueue=made, Empty=real_queue.Empty, Full=real_queue.Full
    )


# ---- concurrent.futures ----


class Future:
    """`concurrent.futures.Future`."""

    def __init__(self, kernel: Kernel) -> None:
        self._waiters = Waiters(kernel)
        self._runs = self._ended = self._cancelled = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._told: list[Callable[[Future], object]] = []

    def add_done_callback(self, tell: Callable[[Future], object]) -> None:
        if self._ended:
            tell(self)
        else:
            self._told.append(tell)

    def done(self) -> bool:
        return self._ended

    def set_running_or_notify_cancel(self) -> bool:
        self._runs = not self._cancelled
        return self._runs

    def cancel(self) -> bool:
        if not (self._runs or self._ended):
            self._cancelled = True
            self._end()
        return self._cancelled

    def set_result(self, result: Any) -> None:
        self._result = result
        self._end()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._end()

    def _end(self) -> None:
        self._ended = True
        self._waiters.wake()
        for tell in self._told:
            tell(self)

    def result(self, timeout: float | None = None) -> Any:
        if not self._waiters.wait_until(self.done, timeout):
            raise TimeoutError
        if self._cancelled:
            raise real_futures.CancelledError
        if self._error is not None:
            raise self._error
        return self._result


class Executor:
    """`concurrent.futures.ThreadPoolExecutor`: a thread for each call, at most so many at once."""

    def __init__(self, kernel: Kernel, max_workers: int, thread_name_prefix: str = "pool") -> None:
        self._kernel, self._most, self._name = kernel, max_workers, thread_name_prefix
        self._running = 0
        self._later: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._idle = Waiters(kernel)

    def submit(self, work: Callable[..., Any], *args: Any) -> Future:
        made = Future(self._kernel)
        self._later.append((made, partial(work, *args)))
        self._begin()
        return made

    def _begin(self) -> None:
        if self._later and self._running < self._most:
            self._running += 1
            self._kernel.spawn(_task(self._kernel).process, self._name, self._run)

    def _run(self) -> None:
        while self._later:
            made, work = self._later.popleft()
            try:
                made.set_result(work())
            except Exception as error:
                made.set_exception(error)
        self._running -= 1
        self._idle.wake()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            for made, _ in self._later:
                made.cancel()
            self._later.clear()
        if wait:
            self._idle.wait_until(lambda: not self._running)

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
