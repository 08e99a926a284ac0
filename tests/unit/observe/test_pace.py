"""How fast a job trains: quantiles that add up over nodes, and the speed of the last minute."""

import json
import random

import pytest

from zero_agent.workers.step_times import SpeedMeter
from zero_contract.worker import Progress
from zero_orchestrator.observe import pace
from zero_orchestrator.observe.pace import Pace, Quantiles, Speed, add_up, bucket, quantiles


def counted(durations_s) -> dict[int, int]:
    return add_up({bucket(duration_s): 1} for duration_s in durations_s)


def test_the_quantiles_of_all_nodes_are_those_of_all_steps_to_three_percent():
    numbers = random.Random(7)
    nodes = [[numbers.lognormvariate(0, 1) for _ in range(400)] for _ in range(5)]
    everything = sorted(duration_s for node in nodes for duration_s in node)
    found = quantiles(add_up(map(counted, nodes)))
    assert found is not None
    assert found.count == 2000
    assert found.p50_s == pytest.approx(everything[999], rel=0.03)
    assert found.p90_s == pytest.approx(everything[1799], rel=0.03)
    assert found.p99_s == pytest.approx(everything[1979], rel=0.03)
    assert quantiles({}) is None


def test_a_single_slow_step_is_in_the_last_quantile_alone():
    found = quantiles(counted([0.5] * 10 + [8.0]))
    assert found == Quantiles(count=11, p50_s=0.5, p90_s=0.5, p99_s=8.0)


def test_a_pace_survives_its_record_and_an_unreadable_one_is_empty():
    one = Pace(
        speed=Speed(steps=2.0, samples=16.0),
        counts={-16: 3},
        ranks={"0": Quantiles(count=3, p50_s=0.5, p90_s=0.5, p99_s=0.5)},
    )
    assert pace.from_record(json.loads(json.dumps(pace.to_record(one)))) == one
    assert pace.from_record(None) == pace.from_record({"speed": 7}) == Pace()


def at(step: int) -> Progress:
    return Progress(step=step, samples=8 * step, tokens=1000 * step)


def test_the_speed_is_that_of_the_last_minute_of_the_round():
    meter = SpeedMeter()
    meter.add(at(1), 0.0)
    assert meter.speed is None
    for step in range(2, 20):
        meter.add(at(step), 10.0 * (step - 1))
        meter.add(at(step), 10.0 * (step - 1) + 5.0)  # another worker
    assert meter.speed == Speed(steps=0.1, samples=0.8, tokens=100.0)
    for number in range(1, 1001):
        meter.add(at(19 + number), 180.0 + 0.1 * number)
    assert meter.speed == Speed(steps=10.0, samples=80.0, tokens=10_000.0)
    meter.begin()
    assert meter.speed is None
    meter.add(Progress(step=5), 1.0)
    meter.add(Progress(step=6), 3.0)
    assert meter.speed == Speed(steps=0.5), "what is not counted is not known"
