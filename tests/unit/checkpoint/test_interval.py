"""How often to save follows from what it costs and how often the job fails."""

from __future__ import annotations

import logging
import math

import pytest

from tests.support.training import config
from zero_checkpoint.saving.schedule import Costs, Failures, Schedule, best_interval_s, daly_s
from zero_contract.errors import ConfigError, ZeroError
from zero_engine.config import load_config

HOUR_S = 3600.0


def lost_share(interval_s, cost_s, between_s):
    """Daly's exact model: the share of time that does not become progress."""
    wall = between_s * (math.exp((interval_s + cost_s) / between_s) - 1) / interval_s
    return 1 - 1 / wall


@pytest.mark.parametrize("cost_s", [0.5, 30, 300])
@pytest.mark.parametrize("between_s", [HOUR_S, 24 * HOUR_S])
def test_no_other_interval_loses_less_time(cost_s, between_s):
    best = daly_s(cost_s, between_s)
    least = lost_share(best, cost_s, between_s)
    for factor in (0.5, 0.8, 1.25, 2):
        assert least < lost_share(best * factor, cost_s, between_s)


def test_saving_that_costs_more_than_a_failure_is_done_as_often_as_failures_come():
    assert daly_s(10, 5) == 5


def test_one_failure_a_day_is_expected_until_the_job_has_failed():
    assert Failures(restarts=0, elapsed_s=0).mean_time_s == pytest.approx(24 * HOUR_S)
    calm = Failures(restarts=0, elapsed_s=240 * HOUR_S).mean_time_s
    assert calm > 100 * 24 * HOUR_S
    assert Failures(restarts=10, elapsed_s=10 * HOUR_S).mean_time_s < 1.3 * HOUR_S


def test_the_reason_names_the_numbers():
    costs = Costs(stall_s=0.5, write_s=12)
    interval_s, reason = best_interval_s(costs, Failures(restarts=3, elapsed_s=2 * HOUR_S))
    assert interval_s == pytest.approx(daly_s(0.5, (2.4 * HOUR_S + 2 * HOUR_S) / 3.1))
    assert reason == (
        "saving every 71.1 s: a save stalls 0.5 s, is written in 12 s, and with 3 restarts in "
        "7200 s a failure is expected every 5110 s"
    )


def test_a_save_never_begins_before_the_one_before_is_written():
    costs = Costs(stall_s=0.001, write_s=90)
    interval_s, reason = best_interval_s(costs, Failures(restarts=9, elapsed_s=HOUR_S))
    assert interval_s == 90
    assert reason.startswith("saving without pause, every 90 s: ")


# ---- the schedule ----


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def schedule(clock, rank=0, **section):
    return Schedule(load_config(config(checkpoint=section)).checkpoint, 0, rank, clock)


def step(clock, *ranks, seconds):
    """A step of so many seconds: everybody hears rank 0."""
    clock.now_s += seconds
    notes = [rank.notes() for rank in ranks]
    for rank in ranks:
        rank.take_notes(notes[0])


def test_steps_are_counted_and_the_beginning_is_not_one():
    ours = schedule(Clock(), every_steps=3)
    assert [ours.due(n, None, None) for n in range(7)] == [n in (3, 6) for n in range(7)]
    assert ours.due(4, 2, None)  # what the script says counts more than the config


def test_seconds_are_counted_from_the_beginning_of_the_last_save():
    clock = Clock()
    ours = schedule(clock, every_s=10)
    step(clock, ours, seconds=9)
    assert not ours.due(1, None, None)
    step(clock, ours, seconds=1)
    assert ours.due(2, None, None)
    assert ours.due(2, None, None)  # until it is done
    ours.begun(0.5)
    assert not ours.due(2, None, None)
    step(clock, ours, seconds=9.5)
    assert ours.due(3, None, None)


def test_auto_first_measures_and_then_follows_its_own_numbers(caplog):
    caplog.set_level(logging.INFO)
    clock = Clock()
    ours, other = schedule(clock, every_s="auto"), schedule(clock, rank=1)
    step(clock, ours, other, seconds=59)
    assert not other.due(1, None, "auto")
    step(clock, ours, other, seconds=1)
    assert ours.due(2, None, None)
    assert other.due(2, None, "auto")
    ours.begun(0.5)
    other.begun(500)  # its own numbers do not count
    ours.committed(3)
    best_s = daly_s(0.5, (2.4 * HOUR_S + 60) / 0.1)
    step(clock, ours, other, seconds=best_s - 2)
    assert not ours.due(3, None, None)
    step(clock, ours, other, seconds=10)
    assert ours.due(4, None, None)
    assert other.due(4, None, "auto")
    told = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[1][:14] for line in told] == [" saving every "] * 2


def test_the_time_of_earlier_rounds_counts():
    clock = Clock()
    ours = schedule(clock)
    ours.resume_from(1000.0)
    clock.now_s += 5
    assert ours.elapsed_s == 1005


@pytest.mark.parametrize("asked", [(None, None), (3, 5.0)])
def test_no_interval_and_two_are_errors_that_say_what_to_write(asked):
    with pytest.raises(ZeroError, match="give it every_steps or every_s, or set one of them"):
        schedule(Clock()).due(1, *asked)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"keep_last": 1}, "checkpoint.keep_last: 1 is less than 2"),
        ({"keep_every": 5}, "only with keep_last"),
        ({"ram": {"every_steps": 0}}, "checkpoint.ram.every_steps: 0 is less than 1"),
        ({"ram": {"replicas": 3}}, "checkpoint.ram.replicas: 3 is more than 2"),
        ({"ram": {"replica": 1}}, "did you mean 'replicas'"),
        ({"ram": True}, "checkpoint.ram: True is not an object"),
        ({"keep_best": {"metric": "loss"}}, "checkpoint.keep_best: only with keep_last"),
        ({"keep_best": {"mode": "max"}, "keep_last": 2}, "checkpoint.keep_best.metric: is missing"),
        ({"keep_best": {"metric": "x", "mode": "up"}}, '\'up\' is not "min" or "max"'),
        ({"keep_best": {"metric": "x", "n": 0}}, "checkpoint.keep_best.n: 0 is less than 1"),
        ({"every_s": -1}, "checkpoint.every_s: -1 is less than 0"),
        ({"every_s": "often"}, "checkpoint.every_s: 'often' is not a number or \"auto\""),
        ({"every_s": 5, "every_steps": 5}, "are both set; keep one"),
        ({"when_busy": "panic"}, '\'panic\' is not "wait" or "skip"'),
        ({"use_node_local_storage": True}, "save to storage that all nodes share"),
        ({"async": 3}, "is not true or false"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(section, says):
    with pytest.raises(ConfigError, match=says):
        load_config(config(checkpoint=section))


def test_a_save_that_found_no_room_is_due_again_after_a_minute_until_one_begins():
    clock = Clock()
    ours, other = schedule(clock), schedule(clock, rank=1)
    step(clock, ours, other, seconds=5)
    ours.failed_for_now()
    ours.begun(2.0)  # that save, which had begun before
    step(clock, ours, other, seconds=59)
    assert not other.due(2, 1000, None)
    step(clock, ours, other, seconds=1)
    assert [rank.due(3, 1000, None) for rank in (ours, other)] == [True, True]
    clock.now_s += 1
    for rank in (ours, other):
        rank.begun(0.5)
    step(clock, ours, other, seconds=100)
    assert not ours.due(4, 1000, None)
