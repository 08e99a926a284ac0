"""Every scheduler of torch under zero_torch: torch's bits, whoever steps it, and after a resume."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedulers

from tests.numerics.promises.back_ends import Recipe, by_torch_alone, everywhere
from tests.support.world import WorldPool

PLACES = [("plain", 1), ("ddp", 2), ("fsdp2", 2), ("stage3", 2)]


def warm_up(step: int) -> float:
    """From a learning rate of 0."""
    return min(step / 2, 1.0)


def sequence(optimizer: Optimizer) -> schedulers.LRScheduler:
    first = schedulers.LinearLR(optimizer, 0.1, total_iters=2)
    return schedulers.SequentialLR(optimizer, [first, schedulers.StepLR(optimizer, 1)], [2])


def chain(optimizer: Optimizer) -> schedulers.LRScheduler:
    first = schedulers.ConstantLR(optimizer, 0.5, total_iters=3)
    return schedulers.ChainedScheduler([first, schedulers.ExponentialLR(optimizer, 0.5)])


MADE: dict[str, Callable[[Optimizer], Any]] = {
    "ChainedScheduler": chain,
    "ConstantLR": partial(schedulers.ConstantLR, factor=0.5, total_iters=3),
    "CosineAnnealingLR": partial(schedulers.CosineAnnealingLR, T_max=3),
    "CosineAnnealingWarmRestarts": partial(schedulers.CosineAnnealingWarmRestarts, T_0=2),
    "CyclicLR": partial(schedulers.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=3),
    "ExponentialLR": partial(schedulers.ExponentialLR, gamma=0.5),
    "LambdaLR": partial(schedulers.LambdaLR, lr_lambda=warm_up),
    "LinearLR": partial(schedulers.LinearLR, start_factor=0.1, total_iters=3),
    "MultiStepLR": partial(schedulers.MultiStepLR, milestones=[1, 3]),
    "MultiplicativeLR": partial(schedulers.MultiplicativeLR, lr_lambda=warm_up),
    "OneCycleLR": partial(schedulers.OneCycleLR, max_lr=0.1, total_steps=6),
    "PolynomialLR": partial(schedulers.PolynomialLR, total_iters=5),
    "ReduceLROnPlateau": partial(schedulers.ReduceLROnPlateau, patience=0),
    "SequentialLR": sequence,
    "StepLR": partial(schedulers.StepLR, step_size=2),
}


def test_every_scheduler_of_torch_is_accounted_for() -> None:
    base = schedulers.LRScheduler
    classes = {
        name
        for name, cls in vars(schedulers).items()
        if isinstance(cls, type) and issubclass(cls, base) and not issubclass(base, cls)
    }
    assert classes - {"_LRScheduler"} == MADE.keys()


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def worse(step: int) -> float:
    """A metric."""
    return float(step)


@pytest.mark.parametrize("own_loop", [True, False])
@pytest.mark.parametrize("name", MADE)
@pytest.mark.corners(name=["ReduceLROnPlateau"], own_loop=[True])
def test_its_bits_are_those_of_torch_alone(
    worlds: WorldPool, tmp_path: Path, name: str, own_loop: bool
) -> None:
    metric = worse if name == "ReduceLROnPlateau" else None
    recipe = Recipe(optimizer=adam, scheduler=MADE[name], metric=metric, own_loop=own_loop)
    (expected,) = worlds.run(1, by_torch_alone, recipe)
    assert len(set(expected)) >= 3
    # Nobody gives the engine a scheduler that needs a metric, so it does not save it.
    places = [place for place in PLACES if metric is None or place[0] != "stage3"]
    assert everywhere(worlds, recipe, tmp_path, places) == dict.fromkeys(places, expected)


@pytest.mark.full
def test_a_metric_that_is_not_given_to_the_engine_is_an_error_before_weights_change(
    worlds: WorldPool, tmp_path: Path
) -> None:
    recipe = Recipe(optimizer=adam, scheduler=MADE["ReduceLROnPlateau"])
    (found,) = everywhere(worlds, recipe, tmp_path, [("stage1", 2)]).values()
    assert len(found) == 1
    assert "ReduceLROnPlateau.step(): missing a required argument: 'metrics'" in found[0]


def state_asked_for(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Torch makes state by a step of its own, with zeros for gradients."""
    if step == 0:
        get_optimizer_state_dict(model, optimizer)


@pytest.mark.full
def test_a_step_by_which_torch_makes_state_is_none_of_the_scripts(
    worlds: WorldPool, tmp_path: Path
) -> None:
    recipe = Recipe(optimizer=adam, scheduler=MADE["LambdaLR"], before=state_asked_for)
    (expected,) = worlds.run(1, by_torch_alone, recipe)
    places = PLACES[:3]  # the engine's optimizer has no state_dict for torch's function
    assert everywhere(worlds, recipe, tmp_path, places) == dict.fromkeys(places, expected)


def prepared(optimizer: Optimizer) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare_scheduler(schedulers.ExponentialLR(optimizer, 0.5))


@pytest.mark.full
def test_a_scheduler_that_accelerate_has_prepared_is_refused(
    worlds: WorldPool, tmp_path: Path
) -> None:
    recipe = Recipe(optimizer=adam, scheduler=prepared)
    (found,) = everywhere(worlds, recipe, tmp_path, [("plain", 1)]).values()
    assert "AcceleratedScheduler steps the scheduler inside" in found[0]
