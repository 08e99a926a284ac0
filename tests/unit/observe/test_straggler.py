"""Which rank is called slow: only one that computes longer, for long, while the others wait."""

from __future__ import annotations

import random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_comm.worker.rank_times import EveryonesTimes
from zero_contract.worker import SLOW_FACTOR, RankTimes, decode, encode
from zero_orchestrator.observe.detectors.straggler import Stragglers, slow_ranks


def trained(steps_s, *, first=0):
    """After each step, in which each rank computes for so long and waits for the last: verdicts."""
    time_s, found, history = 0.0, Stragglers(), []
    everyones = EveryonesTimes(now=lambda: time_s)
    for number, step_s in enumerate([steps_s[0], *steps_s]):
        time_s += max(step_s)
        times = [(own_s, max(step_s) - own_s + 0.01, 0.0, 0.0) for own_s in step_s]
        if report := everyones.add(first + number, times):
            found = found.add(report)
        history.append(found.verdicts)
    return history


def test_a_rank_that_computes_longer_is_named_within_a_minute_with_the_step():
    steps = [[0.5, 0.5, 0.5, 0.5]] * 40 + [[0.5, 0.5, 0.7, 0.5]] * 70
    history = trained(steps, first=1200)
    named = next(i for i, found in enumerate(history) if found)
    assert named - 40 <= 60 / 0.7, "steps until the verdict"
    (found,) = history[named]
    assert (found.rank, round(found.factor, 2), round(found.lost_s, 2)) == (2, 1.4, 0.2)
    assert abs(found.since_step - 1240) <= 6, "half a window"


def test_the_verdict_is_withdrawn_when_the_rank_is_as_fast_as_the_others_again():
    slow, even = [[0.5, 0.5, 1.0]] * 60, [[0.5, 0.5, 0.5]] * 80
    history = trained([*slow, *even])
    assert [found.rank for found in history[60]] == [2]
    assert history[-1] == ()


@pytest.mark.parametrize(
    ("compute_s", "wait_s", "slow"),
    [
        ([1.0, 1.4], [0.4, 0.0], {1}),
        ([1.0, 1.0, 1.4, 1.5], [0.5, 0.5, 0.1, 0.0], {2, 3}),
        ([1.0, 1.0, 1.2], [0.2, 0.2, 0.0], set()),
        ([1.0, 1.0, 1.4], [0.0, 0.0, 0.0], set()),  # nobody waits for it
        ([1.4, 1.4, 1.4], [0.1, 0.1, 0.1], set()),
        ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0], set()),
        ([1.0], [0.0], set()),
        ([], [], set()),
    ],
)
def test_a_rank_is_slow_only_if_others_wait_for_it(compute_s, wait_s, slow):
    assert slow_ranks(compute_s, wait_s).keys() == slow


@given(st.lists(st.floats(0.1, 10.0), min_size=2, max_size=9))
def test_each_rank_is_compared_with_the_median_of_the_others(compute_s):
    wait_s = [max(compute_s) - each for each in compute_s]
    slow = slow_ranks(compute_s, wait_s)
    for rank, own_s in enumerate(compute_s):
        others = [*compute_s[:rank], *compute_s[rank + 1 :]]
        if rank in slow:
            assert slow[rank][0] == pytest.approx(own_s / median(others))
        else:
            others_wait_s = max(compute_s) - median(others)
            lost_s = others_wait_s - wait_s[rank]
            assert own_s < SLOW_FACTOR * median(others) or lost_s <= 0.51 * (own_s - median(others))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    ranks=st.integers(2, 8),
    step_s=st.sampled_from([0.05, 0.5, 5.0]),
    noise=st.floats(0.0, 0.3),
    hiccups=st.floats(0.0, 0.05),
)
def test_no_rank_is_named_in_noise(seed, ranks, step_s, noise, hiccups):
    """1.5 hours in all."""
    assert not any(trained(noisy(180, seed, ranks, step_s, noise, hiccups)))


@pytest.mark.full
@pytest.mark.parametrize("step_s", [0.05, 0.5, 5.0])
@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_no_rank_is_named_in_an_hour_of_noise(ranks, step_s):
    assert not any(trained(noisy(3600, ranks, ranks, step_s, noise=0.2, hiccups=0.05)))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), ranks=st.integers(2, 8), factor=st.floats(1.3, 4.0))
def test_no_rank_is_named_because_another_program_has_its_cpu_for_some_seconds(seed, ranks, factor):
    """For up to 20 s, of any rank, and then of none for 10 s: an hour in all."""
    chance = random.Random(seed)
    steps: list[list[float]] = []
    for _ in range(8):
        busy = chance.randrange(ranks)
        step = [0.1 * (factor if rank == busy else 1.0) for rank in range(ranks)]
        steps += [step] * int(chance.uniform(1.0, 20.0) / max(step))
        steps += [[0.1] * ranks] * 100
    assert not any(trained(steps))


def noisy(time_s, seed, ranks, step_s, noise, hiccups):
    """Steps that are noisy on every rank; some are several times as long, of one rank each."""
    random.seed(seed)

    def of_rank():
        longer = random.choice((2.0, 5.0, 20.0)) if random.random() < hiccups / ranks else 1.0
        return step_s * longer * random.lognormvariate(0.0, noise)

    return [[of_rank() for _ in range(ranks)] for _ in range(int(time_s / step_s))]


def test_a_new_world_begins_anew():
    two = trained([[0.5, 1.0]] * 60)
    assert two[-1]
    begin, other = report_of(2), report_of(3)
    assert Stragglers().add(begin).add(other) == Stragglers(begin=other)


def report_of(ranks):
    zeros = (0.0,) * ranks
    return RankTimes(step=2, steps=1, compute_s=zeros, wait_s=zeros, slow_steps=(0,) * ranks)


def test_the_report_keeps_its_numbers_on_its_way():
    report = RankTimes(step=3, steps=2, compute_s=(1.0, 2.0), wait_s=(0.5, 0.0), slow_steps=(0, 2))
    assert decode(encode(report)) == report
