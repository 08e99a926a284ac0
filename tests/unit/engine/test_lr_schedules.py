"""Learning rates by hand, from DeepSpeed's stated formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from zero_contract.errors import ConfigError
from zero_engine.config import SchedulerConfig
from zero_engine.optim.lr_schedules import OneCycle, Schedule, make_schedule


def optimizer(*rates: float) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.AdamW(groups)


def make(name: str, target: torch.optim.Optimizer, **params: Any) -> Schedule:
    made = make_schedule(SchedulerConfig(type=name, params=params), target)
    assert made is not None
    return made


def series(name: str, steps: int, **params: Any) -> list[float]:
    """The rate before the first step, and after each."""
    schedule = make(name, optimizer(0.1), **params)
    rates = [schedule.get_last_lr()[0]]
    for _ in range(steps):
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    return rates


LOG4 = [math.log(n) / math.log(4) for n in range(1, 5)]


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        # Logarithmic unless told otherwise, up to the group's own rate; two steps at the minimum.
        (
            "WarmupLR",
            {"warmup_num_steps": 4},
            [0.0, *(0.1 * fraction for fraction in LOG4), 0.1, 0.1],
        ),
        (
            "WarmupLR",
            {
                "warmup_num_steps": 4,
                "warmup_type": "linear",
                "warmup_min_lr": 0.2,
                "warmup_max_lr": 1.0,
            },
            [0.2, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0],
        ),
        (
            "WarmupDecayLR",
            {
                "total_num_steps": 8,
                "warmup_num_steps": 4,
                "warmup_type": "linear",
                "warmup_max_lr": 4.0,
            },
            [0, 0, 1, 2, 3, 4, 3, 2, 1, 0, 0],
        ),
        # The default maximum of the decaying one is 0.001, "auto" is the optimizer's rate.
        (
            "WarmupDecayLR",
            {"total_num_steps": 8, "warmup_num_steps": 2, "warmup_type": "linear"},
            [0, 0, 0.0005, 0.001],
        ),
        (
            "WarmupDecayLR",
            {
                "total_num_steps": 8,
                "warmup_num_steps": 2,
                "warmup_type": "linear",
                "warmup_max_lr": "auto",
            },
            [0, 0, 0.05, 0.1],
        ),
        (
            "WarmupCosineLR",
            {
                "total_num_steps": 6,
                "warmup_num_steps": 2,
                "warmup_min_ratio": 0.5,
                "cos_min_ratio": 0.2,
                "warmup_type": "linear",
            },
            [
                0.0,
                0.05,
                0.075,
                *(0.1 * (0.2 + 0.8 * (1 + math.cos(math.pi * n / 4)) / 2) for n in (1, 2, 3, 4, 4)),
            ],
        ),
        (
            "LRRangeTest",
            {
                "lr_range_test_min_lr": 0.5,
                "lr_range_test_step_size": 2,
                "lr_range_test_step_rate": 3,
            },
            [0.5, 1.25, 2.0, 2.75, 3.5],
        ),
        (
            "LRRangeTest",
            {
                "lr_range_test_min_lr": 0.5,
                "lr_range_test_step_size": 2,
                "lr_range_test_staircase": True,
            },
            [0.5, 0.5, 1.0, 1.0, 1.5],
        ),
        (
            "OneCycle",
            {
                "cycle_min_lr": 1,
                "cycle_max_lr": 5,
                "cycle_first_step_size": 2,
                "cycle_second_step_size": 4,
                "decay_step_size": 2,
                "decay_lr_rate": 1,
            },
            # Up in 2, down in 4; from then on 1 / (1 + intervals).
            [1, 3, 5, 4, 3, 2, 1, 1 / 1.5, 1 / 2, 1 / 2.5],
        ),
        (
            "OneCycle",
            {
                "cycle_min_lr": 0,
                "cycle_max_lr": 4,
                "cycle_first_step_size": 4,
                "cycle_first_stair_count": 2,
            },
            [0, 0, 2, 2, 4, 2, 2, 0, 0, 0, 0],
        ),
    ],
)
def test_the_rates_are_deepspeeds(name: str, params: dict[str, Any], expected: list[float]) -> None:
    assert series(name, len(expected) - 1, **params) == pytest.approx(expected, abs=1e-12)


def test_one_cycle_turns_the_momentum_the_other_way() -> None:
    target = optimizer(0.1)
    schedule = make("OneCycle", target, cycle_min_lr=1, cycle_max_lr=5, cycle_first_step_size=2)
    seen = [target.param_groups[0]["betas"]]
    for _ in range(5):
        schedule.step()
        seen.append(target.param_groups[0]["betas"])
    firsts = [first for first, _ in seen]
    assert firsts == pytest.approx([0.8, 0.85, 0.8, 0.85, 0.9, 0.9])
    assert {second for _, second in seen} == {0.99}


def test_every_group_keeps_its_own_rate() -> None:
    target = optimizer(0.1, 0.4)
    schedule = make("WarmupCosineLR", target, total_num_steps=10, warmup_num_steps=2)
    schedule.step(2)
    ratio = 0.0001 + 0.9999 * (1 + math.cos(math.pi / 8)) / 2
    assert schedule.get_last_lr() == pytest.approx([0.1 * ratio, 0.4 * ratio])
    listed = make("WarmupLR", target, warmup_max_lr=[1.0, 2.0], warmup_num_steps=2)
    listed.step(7)
    assert listed.get_lr() == [1.0, 2.0]


@pytest.mark.parametrize("params", [{}, {"warmup_max_lr": "auto"}, {"warmup_max_lr": None}])
def test_without_a_maximum_every_group_warms_up_to_its_own_rate(params: dict[str, Any]) -> None:
    schedule = make("WarmupLR", optimizer(0.1, 0.4), warmup_num_steps=4, **params)
    schedule.step(0)
    assert schedule.get_last_lr() == [0.0, 0.0]
    schedule.step(1)
    assert schedule.get_last_lr() == pytest.approx([0.05, 0.2])
    schedule.step(4)
    assert schedule.get_last_lr() == [0.1, 0.4]


def test_what_the_trainer_writes_and_numbers_in_quotes_are_numbers() -> None:
    schedule = make(
        "WarmupDecayLR",
        optimizer(0.1),
        total_num_steps="1e1",
        warmup_num_steps=0,
        warmup_max_lr="1e-4",
    )
    schedule.step(2)
    assert schedule.get_last_lr() == [1e-4]


GROUPS: dict[str, dict[str, list[float]]] = {
    "LRRangeTest": {"lr_range_test_min_lr": [1, 2]},
    "WarmupLR": {"warmup_min_lr": [0, 1], "warmup_max_lr": [3, 4]},
    "WarmupDecayLR": {"warmup_min_lr": [0, 1], "warmup_max_lr": [3, 4]},
    "OneCycle": {
        "cycle_min_lr": [1, 2],
        "cycle_max_lr": [3, 5],
        "cycle_min_mom": [0.1, 0.2],
        "cycle_max_mom": [0.5, 0.7],
    },
}
"""Every param that has a value for each param group."""
REQUIRED = {"WarmupDecayLR": {"total_num_steps": 9}}


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_with_values_of_its_own_is_scheduled_as_if_it_were_alone(name: str) -> None:
    both, more = optimizer(0.1, 0.1), REQUIRED.get(name, {})
    schedule = make(name, both, **GROUPS[name], **more)
    for index, group in enumerate(both.param_groups):
        own = {key: values[index] for key, values in GROUPS[name].items()}
        alone = make(name, optimizer(0.1), **own, **more)
        for iteration in (-1, 0, 1, 1999, 2000, 5000):
            schedule.step(iteration)
            alone.step(iteration)
            assert group["lr"] == alone.get_last_lr()[0] == schedule.get_lr()[index]
            assert group["betas"] == alone.optimizer.param_groups[0]["betas"]


@pytest.mark.parametrize(("name", "key"), [(n, key) for n, keys in GROUPS.items() for key in keys])
def test_as_many_values_as_groups_are_needed(name: str, key: str) -> None:
    params = {**GROUPS[name], **REQUIRED.get(name, {}), key: [1.0, 2.0, 3.0]}
    with pytest.raises(ConfigError, match=f"{key}: 3 values for 2 param groups"):
        make(name, optimizer(0.1, 0.1), **params)


def test_a_script_reads_the_momentum_of_each_group() -> None:
    target = optimizer(0.1, 0.1)
    schedule = OneCycle(target, 1, 5, cycle_first_step_size=2, cycle_max_mom=[0.9, 0.8])
    assert schedule.get_mom() == [(0.9, 0.99), (0.8, 0.99)], "as DeepSpeed calculates it"
    assert [group["betas"] for group in target.param_groups] == [(0.8, 0.99)] * 2
    schedule.step()
    assert schedule.get_mom() == [group["betas"] for group in target.param_groups]
    assert OneCycle(target, 1, 5, cycle_momentum=False).get_mom() is None


def test_a_restored_schedule_goes_on_as_if_never_stopped() -> None:
    first = make("OneCycle", optimizer(0.1), cycle_min_lr=1, cycle_max_lr=5)
    for _ in range(7):
        first.step()
    second = make("OneCycle", optimizer(0.1), cycle_min_lr=1, cycle_max_lr=5)
    second.load_state_dict(first.state_dict())
    first.step()
    second.step()
    assert second.get_last_lr() == first.get_last_lr()


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("Warmup", {}, "scheduler.type: 'Warmup' is unknown; known: LRRangeTest, OneCycle"),
        ("WarmupDecayLR", {}, "scheduler.params.total_num_steps: missing, or"),
        ("WarmupLR", {"warmup_steps": 3}, "did you mean 'warmup_num_steps'"),
        ("WarmupLR", {"warmup_num_steps": -1}, "warmup_num_steps: -1 is less than 0"),
        ("WarmupDecayLR", {"total_num_steps": 0}, "total_num_steps: 0 is less than 1"),
        ("WarmupDecayLR", {"total_num_steps": "many"}, "'many' is not an integer"),
        ("WarmupLR", {"warmup_max_lr": -0.1}, "scheduler.params.warmup_max_lr: -0.1 is less"),
        ("WarmupLR", {"warmup_max_lr": "much"}, "warmup_max_lr: 'much' is not a number"),
        ("WarmupLR", {"warmup_max_lr": math.nan}, "warmup_max_lr: nan is not a number"),
        ("OneCycle", {"cycle_min_lr": 1, "cycle_max_lr": "x"}, "cycle_max_lr: 'x' is not a number"),
        ("WarmupLR", {"warmup_min_lr": [1, 2, 3]}, "3 values for 1 param groups"),
    ],
)
def test_a_mistake_in_the_config_is_named(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(name, optimizer(0.1), **params)
    assert message in str(caught.value)


def test_an_unknown_warmup_type_means_log_as_in_deepspeed(caplog: pytest.LogCaptureFixture) -> None:
    steps = {"warmup_num_steps": 4, "warmup_max_lr": 0.1}
    found = make("WarmupLR", optimizer(0.1), **steps, warmup_type="cubic")
    assert found.warmup_type == make("WarmupLR", optimizer(0.1), **steps).warmup_type == "log"
    assert "warmup_type: 'cubic' is not \"linear\"" in caplog.text
