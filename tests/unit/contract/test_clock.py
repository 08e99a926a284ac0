from __future__ import annotations

import threading

import pytest

from tests.support.manual_clock import ManualClock
from zero_contract.clock import SystemClock, process_age_s


def test_a_manual_clock_runs_each_action_when_it_is_due() -> None:
    clock, seen = ManualClock(100.0), []

    def every(name: str, period_s: float, count: int) -> None:
        left = iter(range(count - 1, -1, -1))

        def act() -> float | None:
            seen.append((name, clock.now()))
            return period_s if next(left) else None

        clock.repeat(act, period_s)

    every("a", 2.0, 3)
    every("b", 3.0, 2)
    clock.advance(1.0)
    assert seen == []
    clock.advance(9.0)
    assert seen == [("a", 102.0), ("b", 103.0), ("a", 104.0), ("b", 106.0), ("a", 106.0)]
    assert clock.now() == 110.0


def test_a_cancelled_action_does_not_run_again_even_if_it_cancels_itself() -> None:
    clock, runs = ManualClock(), []

    def act() -> float:
        runs.append(clock.now())
        repeating.cancel()
        return 1.0

    repeating = clock.repeat(act, 1.0)
    other = clock.repeat(lambda: runs.append(-1.0), 1.0)
    other.cancel()
    clock.advance(5.0)
    assert runs == [1.0]


def test_a_manual_clock_never_goes_back() -> None:
    with pytest.raises(ValueError, match="never goes back"):
        ManualClock().advance(-1.0)


def test_the_systems_clock_repeats_on_a_thread_of_its_own_until_told_to_stop() -> None:
    clock, done, threads = SystemClock(), threading.Event(), []

    def act() -> float | None:
        threads.append(threading.current_thread())
        if len(threads) < 3:
            return 0.0
        done.set()
        return 60.0

    repeating = clock.repeat(act, 0.0)
    assert done.wait(60)
    repeating.cancel()
    assert len(set(threads)) == 1
    assert threads[0] is not threading.current_thread()
    threads[0].join(60)
    assert not threads[0].is_alive()


def test_an_action_that_fails_is_logged_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    clock, runs = ManualClock(), []

    def act() -> float:
        runs.append(clock.now())
        raise RuntimeError("a mistake")

    clock.repeat(act, 1.0)
    clock.advance(5.0)
    assert runs == [1.0]
    assert "a mistake" in caplog.text


def test_the_age_of_a_process_is_the_kernels(tmp_path):
    before_s = process_age_s()
    assert 0 < before_s <= process_age_s()
    assert process_age_s(tmp_path) == 0.0
