"""Calls on threads of their own, each of which comes back: with its answer, or with its error.

Whoever waits for such a call would wait for ever if its thread ended with an exception, or if it
could not be started: a process may be out of threads (ulimit -u, pids.max of its container).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def beside(call: Callable[[], T], done: Callable[[T | Exception], object], name: str) -> None:
    """Run `call` on a thread of this name, and `done` with its answer, or why there is none."""

    def run() -> None:
        answer: T | Exception
        try:
            answer = call()
        except Exception as error:
            answer = error
        done(answer)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        done(RuntimeError(f"{error}: allow more of them (ulimit -u, pids.max)"))
