"""Who hears this process's signals, and when what a handler raises may come.

A handler may raise at any point of the main thread: between the start of a process and the note
of it, and within a `__del__`, where Python drops it. So whatever cannot bear that is `held`, and
a call that may wait for long inside a library has a thread of its own (`call_until_signal`).

Must always hold: no signal is lost; no wait for one is without an end. Who calls it: `cli`,
`scratch`, `etcd_process`, `local_etcd`.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Handle = Callable[[int], None]

_LOOK_S = 0.1


def install(handle: Handle, numbers: Sequence[int]) -> list[Any]:
    """From now on these signals go there; the handlers before. Main thread only."""
    return [signal.signal(number, lambda got, frame: handle(got)) for number in numbers]


def ignore(numbers: Sequence[int]) -> None:
    """From now on these signals do nothing."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def installed(handle: Handle, numbers: Sequence[int]) -> Iterator[None]:
    """These signals go there while the context lasts."""
    before = install(handle, numbers)
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Handlers run when the context ends: it is for what must not stay half done, and is short."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread
        return
    came: list[int] = []
    numbers = [n for n in signal.valid_signals() if callable(signal.getsignal(n))]
    try:
        with installed(came.append, numbers):
            yield
    finally:
        for number in came:
            signal.raise_signal(number)


def call_until_signal(call: Callable[[], object], numbers: Sequence[int]) -> int | None:
    """The signal that came before the call ended, which then goes on alone; raises as it does."""
    came: list[int] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="zero-call", daemon=True)
    with installed(came.append, numbers):
        thread.start()
        while thread.is_alive() and not came:
            thread.join(_LOOK_S)  # without an end, it would miss a signal that comes as it begins
    if came:
        return came[0]
    for error in failed:
        raise error
    return None
