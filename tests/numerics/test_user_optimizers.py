"""Optimizers by name and by object, schedulers built on them, and steps that are skipped."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zero_deepspeed
from tests.support.models import Tokens, make_model, param_groups
from tests.support.saving import heard
from tests.support.training import DATASET_SIZE, config, make_engine, train
from tests.support.world import (
    Stages,
    WorldError,
    WorldPool,
    of_stages,
    one_of_stages,
    one_result,
)
from zero_contract.errors import ConfigError
from zero_deepspeed.utils import safe_get_full_optimizer_state

STEPS = 4
STAGES = (0, 1, 2, 3)


# ---- optimizers and schedules ----


@pytest.mark.parametrize(
    "optimizer",
    [
        {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
        {"type": "Adam", "params": {"lr": 0.01, "adam_w_mode": False}},
        {"type": "Adagrad", "params": {"lr": 0.01, "initial_accumulator_value": 0.1}},
    ],
    ids=lambda optimizer: optimizer["type"],
)
@pytest.mark.full
def test_every_elementwise_optimizer_of_the_config_gives_one_result(
    worlds: WorldPool, optimizer: dict[str, Any]
) -> None:
    hashes = one_result(worlds, train_stages, optimizer)
    assert len(set(hashes)) == 1


def train_stages(optimizer: dict[str, Any]) -> list[str]:
    hashes = []
    for stage in STAGES:
        engine = make_engine(config(stage, optimizer=optimizer))
        train(engine, STEPS)
        hashes.append(engine.weight_hash())
    return hashes


def test_the_users_optimizer_stays_the_same_object_and_schedulers_built_on_it_work(
    worlds: WorldPool,
) -> None:
    by_object = one_result(worlds, train_with_own_optimizer, "object", 2)
    by_callable = one_result(worlds, train_with_own_optimizer, "callable", 3)
    assert by_object == by_callable
    _, rates = by_object
    # Two groups, each with its own rate, halved after each of the four steps.
    assert rates == [pytest.approx(1e-2 / 16), pytest.approx(5e-3 / 16)]


def test_what_is_given_beside_the_configs_section_is_used_and_said_once(
    worlds: WorldPool,
) -> None:
    first, second = worlds.run(2, train_with_both)
    assert first[:2] == second[:2] == (["SGD", 0.25], ["LambdaLR", [0.125]])
    assert [line.split(",")[0] for line in first[2]] == [
        "the optimizer given to initialize() is used",
        "the lr_scheduler given to initialize() is used",
    ]
    assert second[2] == []


def train_with_both() -> tuple[list[Any], list[Any], list[str]]:
    model = make_model(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    settings = config(1, scheduler={"type": "WarmupLR"})
    with heard(logging.WARNING) as lines:
        engine = make_engine(
            settings,
            model=model,
            model_parameters=None,
            optimizer=optimizer,
            lr_scheduler=scheduler,
        )
    used = [type(engine.optimizer).__name__, optimizer.param_groups[0]["lr"]]
    train(engine, 1)
    return used, [type(engine.lr_scheduler).__name__, engine.get_lr()], lines


def train_with_own_optimizer(how: str, stage: int) -> tuple[str, list[float]]:
    model = make_model()
    settings = config(stage)
    del settings["optimizer"]

    def make(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=1e-2)

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    groups = param_groups(model)
    own = make(groups) if how == "object" else make
    scheduler = schedule(own) if isinstance(own, torch.optim.Optimizer) else schedule
    engine, optimizer, _, returned = zero_deepspeed.initialize(
        model=model,
        optimizer=own,
        model_parameters=groups,
        training_data=Tokens(DATASET_SIZE),
        lr_scheduler=scheduler,
        config=settings,
    )
    if how == "object":
        assert optimizer is own
        assert returned is scheduler
    assert engine.optimizer is optimizer
    train(engine, STEPS)
    return engine.weight_hash(), engine.get_lr()


def test_an_optimizer_of_foreign_parameters_is_refused(worlds: WorldPool) -> None:
    with pytest.raises(WorldError, match="is not one of the model's; make the optimizer from"):
        worlds.run(1, initialize_with_foreign_parameters)


def initialize_with_foreign_parameters() -> None:
    settings = config()
    del settings["optimizer"]
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    zero_deepspeed.initialize(model=make_model(), optimizer=stranger, config=settings)


class FusedLAMB(torch.optim.SGD):
    """By its name another package's, which takes one norm of all parameters."""


def test_an_object_that_looks_at_all_parameters_is_refused_with_what_to_use_instead(
    worlds: WorldPool,
) -> None:
    refused = r'FusedLAMB looks at all.*use that of the config.*"lamb".*needs_whole_parameters = T'
    with pytest.raises(WorldError, match=refused):
        worlds.run(1, initialize_with_a_lamb_of_others)


def initialize_with_a_lamb_of_others() -> None:
    settings = config()
    del settings["optimizer"]
    model = make_model()
    stranger = FusedLAMB(model.parameters(), lr=0.1)
    zero_deepspeed.initialize(model=model, optimizer=stranger, config=settings)


class Lomo(torch.optim.Optimizer):
    """Steps in hooks of the gradients, and has no step() of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})


class Wraps:
    """No optimizer by its class."""

    def __init__(self, params: Any) -> None:
        self.inner = torch.optim.SGD(params, lr=0.1)

    def step(self) -> None:
        self.inner.step()


class Lookahead(torch.optim.Optimizer):
    """Shares the param groups of the optimizer by which it steps, and not its state."""

    def __init__(self, params: Any) -> None:
        self.fast = torch.optim.Adam(params)
        super().__init__(self.fast.param_groups, {})

    def step(self, closure: Any = None) -> None:
        self.fast.step()


def initialize_with_an_object_of(make: Callable[[Any], Any]) -> str:
    settings, model = config(), make_model()
    del settings["optimizer"]
    with pytest.raises(ConfigError) as caught:
        zero_deepspeed.initialize(model=model, optimizer=make(model.parameters()), config=settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("make", "told", "instead"),
    [
        (Lomo, "Lomo has no step(): it acts within the backward", 'use "adafactor", "muon" or "li'),
        (Wraps, "Wraps is no torch.optim.Optimizer", "give the optimizer that it wraps"),
        (Lookahead, "Lookahead steps by another one, Adam, in its attribute fast", "give that one"),
    ],
)
def test_an_object_that_the_engine_cannot_step_or_save_is_refused_with_what_to_use_instead(
    worlds: WorldPool, make: Callable[[Any], Any], told: str, instead: str
) -> None:
    for refused in worlds.run(2, initialize_with_an_object_of, make):
        assert told in refused
        assert instead in refused


@of_stages
def test_a_step_whose_gradients_are_not_finite_is_skipped_on_every_rank(
    worlds: WorldPool, stages: Stages
) -> None:
    before, after, *counts = one_of_stages(worlds, stages, skip_a_step)
    assert before == after
    # Skipped once; the data moved on, the schedule did not; the next step was applied.
    assert counts == [1, False, 20, 1e-2, 1e-2 / 2, 2]


def skip_a_step(stage: int) -> tuple[Any, ...]:
    engine = make_engine(
        config(stage),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=1, gamma=0.5),
    )
    before = engine.weight_hash()
    loader = engine.training_dataloader
    assert loader is not None
    for batch in loader:
        loss = engine(batch)
        # One micro-batch, on one rank.
        spoil = engine.global_rank == 0 and engine.micro_steps == 0
        engine.backward(loss * float("inf") if spoil else loss)
        engine.step()
        if engine.global_steps == 1:
            break
    after, skipped = engine.weight_hash(), (engine.skipped_steps, engine.was_step_applied())
    rate = engine.get_lr()[0]
    train(engine, 2)
    return before, after, *skipped, engine.global_samples, rate, engine.get_lr()[0], 2


# ---- schedulers in checkpoints ----

SCHEDULES: dict[str, Any] = {
    "milestones": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3], gamma=0.5),
    "numpy": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: np.cos(0.5 * step)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_with_any_scheduler_of_torch_is_saved_and_resumes(
    worlds: WorldPool, tmp_path: Path, name: str
) -> None:
    (expected,) = worlds.run(1, train_on_a_schedule, name, str(tmp_path / "whole"), 4)
    worlds.run(1, train_on_a_schedule, name, str(tmp_path / "halves"), 2)
    assert worlds.run(1, train_on_a_schedule, name, str(tmp_path / "halves"), 4) == [expected]


def train_on_a_schedule(name: str, root: str, until: int) -> tuple[str, list[float]]:
    engine = make_engine(config(1), lr_scheduler=SCHEDULES[name])
    engine.load_checkpoint(root)
    train(engine, until)
    assert engine.save_checkpoint(root, blocking=True)
    return engine.weight_hash(), engine.get_lr()


# ---- rates that are tensors ----


def test_set_lr_keeps_a_rate_that_is_a_tensor(worlds: WorldPool) -> None:
    """A compiled step of the optimizer reads it from there."""
    assert worlds.run(1, set_a_rate) == [(True, 0.25)]


def set_a_rate() -> tuple[bool, float]:
    model, rate = make_model(), torch.tensor(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, foreach=False)
    settings = config(1)
    del settings["optimizer"]
    engine = make_engine(settings, model=model, model_parameters=None, optimizer=optimizer)
    engine.set_lr(0.25)
    return optimizer.param_groups[0]["lr"] is rate, float(rate)


# ---- optimizers that have stepped already ----


class Layers(nn.Module):
    """Three units: two layers and the root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.shift = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x + self.shift).square().mean()


def stepped_before(
    steps: dict[str, int], groups: int, whole: bool, name: str = "AdamW"
) -> tuple[str, list[Any]]:
    """What is refused, and of each parameter its count of steps and whether its mean has come."""
    model = Layers()
    named = dict(model.named_parameters())
    members = [[p for n, p in named.items() if n in steps], list(named.values())]
    members[1] = [p for p in members[1] if groups == 1 or all(p is not q for q in members[0])]
    cls = getattr(torch.optim, name)
    optimizer = cls([{"params": each} for each in members[-groups:]], lr=0.1)
    optimizer.needs_whole_parameters = whole
    for step in range(max(steps.values())):
        for fqn, param in named.items():
            param.grad = torch.ones_like(param) if step < steps.get(fqn, 0) else None
        optimizer.step()
    before = {n: dict(optimizer.state[p]) for n, p in named.items() if p in optimizer.state}
    settings = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}
    refused = ""
    try:
        zero_deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    except ConfigError as error:
        refused = str(error)
        optimizer.state.clear()
        zero_deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    found: list[Any] = []
    for fqn, param in named.items():
        mean = safe_get_full_optimizer_state(param, "exp_avg")
        count = safe_get_full_optimizer_state(param, "step")
        same = mean is not None and torch.equal(mean, before[fqn]["exp_avg"])
        product = safe_get_full_optimizer_state(param, "mu_product")
        assert product is None or torch.equal(product, before[fqn]["mu_product"])
        found.append((None if count is None else int(count), same))
    return refused, found


NAMES = ["shift", *(f"layers.{n}.{kind}" for n in (0, 1) for kind in ("weight", "bias"))]
EVERY = dict.fromkeys(NAMES, 3)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ["AdamW", "NAdam"])
@pytest.mark.corners(world=[2], name=["NAdam"])
def test_an_optimizer_that_has_stepped_all_goes_on_where_it_is(
    worlds: WorldPool, world: int, name: str
) -> None:
    """NAdam has further numbers, in tensors of the shape of a parameter without dimensions."""
    for refused, found in worlds.run(world, stepped_before, EVERY, 1, False, name):
        assert (refused, found) == ("", [(3, True)] * 5)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.corners(world=[2])
@pytest.mark.parametrize(
    "steps",
    [
        {NAMES[0]: 3},
        {NAMES[1]: 3},
        {NAMES[4]: 3},
        {NAMES[1]: 3, NAMES[2]: 3},
        EVERY | {NAMES[3]: 2},
        EVERY | {NAMES[0]: 1},
    ],
    ids=str,
)
def test_an_optimizer_that_has_stepped_a_part_of_a_group_is_refused_or_given_it_as_groups(
    worlds: WorldPool, world: int, steps: dict[str, int]
) -> None:
    for refused, found in worlds.run(world, stepped_before, steps, 1, False):
        assert "optimizer: the parameters of param group 0 were not stepped alike: " in refused
        assert "optimizer.state.clear()" in refused
        assert found == [(None, False)] * 5
    # Whole parameters have each a state of their own.
    counts = [steps.get(name) for name in NAMES]
    given = [(count, count is not None) for count in counts]
    for refused, found in worlds.run(world, stepped_before, steps, 1, True):
        assert (refused, found) == ("", given)
    if len(set(steps.values())) == 1:
        for refused, found in worlds.run(world, stepped_before, steps, 2, False):
            assert (refused, found) == ("", given)
