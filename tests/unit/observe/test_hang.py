"""Which workers are taken for hung, and which are only slow."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.manual_clock import ManualClock
from zero_agent.workers.hang import Judgement
from zero_agent.workers.progress import (
    FACTOR,
    FLOOR_S,
    HangPolicy,
    StepClock,
    Steps,
    parse_hang_timeout,
)


def beats(policy: HangPolicy, *times_s: float) -> StepClock:
    clock = StepClock(policy)
    for time_s in times_s:
        clock.beat(time_s)
    return clock


def test_nothing_is_judged_before_the_second_step():
    assert beats(HangPolicy()).verdict(1e6) is None
    assert beats(HangPolicy(), 5.0).verdict(1e6) is None


def test_quick_steps_are_given_the_shortest_limit():
    clock = beats(HangPolicy(), 0.0, 0.1, 0.2)
    assert clock.limit_s == FLOOR_S
    assert clock.verdict(0.2 + FLOOR_S) is None
    assert clock.verdict(0.3 + FLOOR_S) == "no step for 300.1 s (limit 300.0 s, 10x a long step)"


def test_long_steps_that_are_usual_are_allowed():
    clock = beats(HangPolicy(), 0.0, 60.0, 61.0, 121.0, 122.0)
    assert clock.limit_s == FACTOR * 60.0
    assert clock.verdict(122.0 + 599.0) is None


@given(
    usual_s=st.lists(st.integers(1, 600), min_size=1, max_size=400),
    at=st.integers(0, 400),
    hiccup_s=st.integers(600, 10**6),
)
def test_a_step_that_took_long_once_does_not_raise_the_limit_of_the_others(usual_s, at, hiccup_s):
    """A stall of ten minutes that ended by itself must not hide the next one."""
    without = beats(HangPolicy(), *accumulate([0, *usual_s]))
    at %= len(usual_s) + 1
    with_it = beats(HangPolicy(), *accumulate([0, *usual_s[:at], hiccup_s, *usual_s[at:]]))
    assert with_it.limit_s <= max(FLOOR_S, FACTOR * max(usual_s))
    assert with_it.limit_s >= without.limit_s


def test_a_stall_after_one_that_ended_by_itself_is_noticed_as_soon():
    clock = ManualClock()
    steps = Steps(HangPolicy(), clock)
    steps.begin({})

    def step(took_s: float) -> None:
        clock.advance(took_s)
        steps.beat(0)

    for took_s in (1.0, 1.0, 1.0, 600.0):
        step(took_s)
    clock.advance(15.1)
    assert steps.is_missing()


def test_a_fixed_limit_holds_from_the_first_step():
    clock = beats(HangPolicy(limit_s=2.0), 10.0)
    assert clock.verdict(12.0) is None
    assert clock.verdict(12.5) == "no step for 2.5 s (limit 2.0 s, --hang-timeout)"


def test_it_can_be_switched_off():
    assert beats(HangPolicy(enabled=False), 0.0, 0.1).verdict(1e6) is None


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("auto", HangPolicy()),
        ("off", HangPolicy(enabled=False)),
        ("2.5", HangPolicy(limit_s=2.5)),
        ("10m", HangPolicy(limit_s=600.0)),
    ],
)
def test_what_can_be_written(text, policy):
    assert parse_hang_timeout(text) == policy


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "nan"])
def test_what_cannot(text):
    with pytest.raises(ValueError, match=r".*"):
        parse_hang_timeout(text)


def test_the_time_in_which_the_agent_itself_stood_still_makes_no_worker_hung():
    """A container was paused, or Slurm has suspended the job: the workers stood still with it."""
    clock = ManualClock()
    steps = Steps(HangPolicy(limit_s=60.0), clock)
    steps.begin({})
    steps.beat(0)

    def look_for(seconds: int) -> Judgement | None:
        for _ in range(10 * seconds):
            clock.advance(0.1)
            if found := steps.too_slow():
                return found
        return None

    assert look_for(30) is None
    clock.advance(3600)
    assert look_for(29) is None
    assert look_for(2) == (0, "no step for 60.1 s (limit 60.0 s, --hang-timeout)")
