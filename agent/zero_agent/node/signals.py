"""Signal handlers of this process, and when the exception of a handler may come.

A handler may raise at any point of the main thread: between the start of a process and the note
of it, and within a `__del__`, where Python drops the exception. So code that must not be
interrupted runs in `held`, and a call that may wait for long inside a library runs on its own
thread (`call_until_signal`). No signal is lost.
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
    """Install `handle` for these signals; returns the former handlers. Main thread only."""
    return [signal.signal(number, lambda got, frame: handle(got)) for number in numbers]


def ignore(numbers: Sequence[int]) -> None:
    """Ignore these signals from now on."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def installed(handle: Handle, numbers: Sequence[int]) -> Iterator[None]:
    """Install `handle` for these signals while the context lasts."""
    before = install(handle, numbers)
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Delay all handlers to the end of the context: for short work that must not be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread
        return
    came: list[int] = []
    # Of the others no handler could raise: they are ignored, or have the kernel's default.
    numbers = [n for n in signal.valid_signals() if callable(signal.getsignal(n))]
    try:
        with installed(came.append, numbers):
            yield
    finally:
        for number in came:  # the former handlers are back
            signal.raise_signal(number)


def call_until_signal(call: Callable[[], object], numbers: Sequence[int]) -> int | None:
    """Run `call` on a thread until it ends (None), or one of these signals comes: the first.

    Raises:
        Exception: Whatever the call raised.
    """
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
            thread.join(_LOOK_S)  # an unbounded join would miss a signal that comes as it begins
    # After a signal the call goes on, on its thread: nothing can end it.
    if came:
        return came[0]
    for error in failed:
        raise error
    return None
