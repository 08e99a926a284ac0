"""Waiting in tests: for a condition, with a deadline, never for a length of time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_POLL_S, _MOST_S = 0.01, 0.2
"""Between two looks; one that takes long is taken less often, to leave the cores to others."""


def wait_for(condition: Callable[[], T], timeout_s: float, what: str) -> T:
    """The condition's first true value; fails with `what` and the last value after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        began = time.monotonic()
        if value := condition():
            return value
        if (now := time.monotonic()) > deadline:
            raise AssertionError(f"{what}: not within {timeout_s:g} s; last seen: {value!r}")
        time.sleep(min(max(_POLL_S, 4 * (now - began)), _MOST_S))
