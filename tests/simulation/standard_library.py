"""The parts of Python's standard library that wait, measure time or draw numbers, on a `Kernel`.

`installed` puts them in the place of `threading`, `queue`, `time`, `random` and `secrets` in every
module of the product. The product then runs unchanged, its own `SystemClock` too: a thread is a
task, and a wait takes simulated time alone.
"""

from __future__ import annotations

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
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.simulation.kernel import Kernel, Task

EPOCH_S = 1_750_000_000.0
"""The time of day at which a simulation begins."""
PACKAGES = ("zero_agent", "zero_orchestrator", "zero_contract", "tenacity")


def standard_library(kernel: Kernel) -> dict[str, Any]:
    """The simulated modules, by the names of the real ones."""
    return {
        "threading": _threading(kernel),
        "queue": _queue(kernel),
        "time": _time(kernel),
        "random": kernel.random("product"),
        "secrets": _secrets(kernel),
    }


REAL: dict[str, ModuleType] = {
    "threading": real_threading,
    "queue": real_queue,
    "time": real_time,
    "random": real_random,
    "secrets": real_secrets,
}


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


def _threading(kernel: Kernel) -> Any:  # noqa: C901 (a module)
    class Lock:
        """`threading.Lock` and `RLock`."""

        def __init__(self) -> None:
            self.holder: object = None
            self.depth = 0
            self.waiting: deque[Task] = deque()

        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            me = kernel.current or "world"
            while self.holder is not None and self.holder is not me:
                if not blocking:
                    return False
                self.waiting.append(_task(kernel))
                if not kernel.park(None if timeout < 0 else timeout):
                    return False
            self.holder = me
            self.depth += 1
            return True

        def release(self) -> None:
            self.depth -= 1
            if not self.depth:
                self.holder = None
                if self.waiting:
                    kernel.wake(self.waiting.popleft())

        def __enter__(self) -> bool:
            return self.acquire()

        def __exit__(self, *_: object) -> None:
            self.release()

    class Condition:
        def __init__(self, lock: Lock | None = None) -> None:
            self.lock = lock or Lock()
            self.waiting: list[Task] = []
            self.acquire, self.release = self.lock.acquire, self.lock.release

        def __enter__(self) -> bool:
            return self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

        def wait(self, timeout: float | None = None) -> bool:
            me = _task(kernel)
            self.waiting.append(me)
            depth, self.lock.depth = self.lock.depth, 1
            self.lock.release()
            woken = kernel.park(timeout)
            if me in self.waiting:
                self.waiting.remove(me)
            self.lock.acquire()
            self.lock.depth = depth
            return woken

        def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
            until_s = None if timeout is None else kernel.now + timeout
            while not (found := predicate()):
                left_s = None if until_s is None else until_s - kernel.now
                if left_s is not None and left_s <= 0:
                    break
                self.wait(left_s)
            return found

        def notify(self, n: int = 1) -> None:
            woken, self.waiting = self.waiting[:n], self.waiting[n:]
            for task in woken:
                kernel.wake(task)

        def notify_all(self) -> None:
            self.notify(len(self.waiting))

    class Event:
        def __init__(self) -> None:
            self._set = False
            self._waiting: list[Task] = []

        def is_set(self) -> bool:
            return self._set

        def set(self) -> None:
            self._set = True
            woken, self._waiting = self._waiting, []
            for task in woken:
                kernel.wake(task)

        def clear(self) -> None:
            self._set = False

        def wait(self, timeout: float | None = None) -> bool:
            until_s = None if timeout is None else kernel.now + timeout
            while not self._set:
                left_s = None if until_s is None else until_s - kernel.now
                if left_s is not None and left_s <= 0:
                    break
                me = _task(kernel)
                self._waiting.append(me)
                kernel.park(left_s)
                if me in self._waiting:
                    self._waiting.remove(me)
            return self._set

    class Thread:
        def __init__(
            self,
            group: None = None,
            target: Callable[..., object] | None = None,
            name: str = "thread",
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
            *,
            daemon: bool | None = None,
        ) -> None:
            self.name, self.daemon, self.ident = name, daemon, None
            self._work = lambda: target and target(*args, **(kwargs or {}))
            self._task: Task | None = None

        def start(self) -> None:
            me = _task(kernel)
            if not me.killed:
                self._task = kernel.spawn(me.process, self.name, self._work)

        def join(self, timeout: float | None = None) -> None:
            until_s = None if timeout is None else kernel.now + timeout
            while self._task is not None and not self._task.ended:
                left_s = None if until_s is None else until_s - kernel.now
                if left_s is not None and left_s <= 0:
                    return
                self._task.joining.append(_task(kernel))
                kernel.park(left_s)

        def is_alive(self) -> bool:
            return self._task is not None and not self._task.ended

        def __eq__(self, other: object) -> bool:
            mine = self._task
            return isinstance(other, Thread) and mine is not None and mine is other._task

        __hash__ = object.__hash__

    def current_thread() -> Thread:
        found = Thread()
        found._task = kernel.current
        return found

    return SimpleNamespace(
        Thread=Thread,
        Lock=Lock,
        RLock=Lock,
        Condition=Condition,
        Event=Event,
        local=SimpleNamespace,  # tenacity makes one for each call
        get_ident=lambda: kernel.current.ident if kernel.current else 0,
        current_thread=current_thread,
    )


def _queue(kernel: Kernel) -> Any:  # noqa: C901 (a module)
    class Queue:
        """`queue.Queue` and `SimpleQueue`."""

        def __init__(self, maxsize: int = 0) -> None:
            self._maxsize = maxsize
            self._items: deque[Any] = deque()
            self._getting: deque[Task] = deque()
            self._putting: deque[Task] = deque()

        def qsize(self) -> int:
            return len(self._items)

        def empty(self) -> bool:
            return not self._items

        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            until_s = None if timeout is None else kernel.now + timeout
            while self._maxsize and len(self._items) >= self._maxsize:
                left_s = None if until_s is None else until_s - kernel.now
                if not block or (left_s is not None and left_s <= 0):
                    raise real_queue.Full
                self._putting.append(_task(kernel))
                kernel.park(left_s)
            self._items.append(item)
            if self._getting:
                kernel.wake(self._getting.popleft())

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            until_s = None if timeout is None else kernel.now + timeout
            while not self._items:
                left_s = None if until_s is None else until_s - kernel.now
                if not block or (left_s is not None and left_s <= 0):
                    raise real_queue.Empty
                me = _task(kernel)
                self._getting.append(me)
                if not kernel.park(left_s) and me in self._getting:
                    self._getting.remove(me)
            if self._putting:
                kernel.wake(self._putting.popleft())
            return self._items.popleft()

        def put_nowait(self, item: Any) -> None:
            self.put(item, block=False)

        def get_nowait(self) -> Any:
            return self.get(block=False)

    return SimpleNamespace(
        Queue=Queue, SimpleQueue=Queue, Empty=real_queue.Empty, Full=real_queue.Full
    )
