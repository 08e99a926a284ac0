from __future__ import annotations

import threading
import time

import pytest

from zero_orchestrator.errors import StoreRefused, StoreUnavailable
from zero_orchestrator.store import retry


class Failing:
    """Fails so many times, then returns how often it was called."""

    def __init__(self, times: float, error: Exception | None = None) -> None:
        self.calls = 0
        self.times = times
        self.error = error or StoreUnavailable("away")

    def __call__(self) -> int:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return self.calls


def test_what_passes_by_itself_is_tried_again() -> None:
    assert retry.within(5.0)(Failing(2)) == 3


def test_a_refusal_is_not_tried_again() -> None:
    call = Failing(9, StoreRefused("no"))
    with pytest.raises(StoreRefused):
        retry.within(5.0)(call)
    assert call.calls == 1


def test_the_last_error_comes_out_when_the_time_is_up() -> None:
    started = time.monotonic()
    call = Failing(float("inf"))
    with pytest.raises(StoreUnavailable, match="away"):
        retry.within(1.5)(call)
    assert time.monotonic() - started >= 1.5
    assert call.calls >= 2


@pytest.mark.parametrize("forever", [True, False])
def test_trying_ends_at_once_when_it_is_cancelled(forever: bool) -> None:
    cancelled = threading.Event()
    policy = retry.until_set(cancelled) if forever else retry.within(60.0, cancelled=cancelled)
    call = Failing(float("inf"))
    threading.Timer(0.2, cancelled.set).start()
    started = time.monotonic()
    with pytest.raises(StoreUnavailable):
        policy(call)
    assert time.monotonic() - started < 30.0  # a minute, or for ever
