"""Waiting in tests: for a condition, with a deadline, never for a length of time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_POLL_S = 0.01


def wait_for(condition: Callable[[], T], timeout_s: float, what: str) -> T:
    """The condition's first true value; fails with `what` and the last value after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout_s:g} s; last seen: {value!r}")
        time.sleep(_POLL_S)
    return value
