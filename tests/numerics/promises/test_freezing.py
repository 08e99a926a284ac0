"""`requires_grad` as it is at a step says what is trained in it, under every back_end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from tests.numerics.promises.back_ends import (
    PLACES,
    STOCK,
    Net,
    Place,
    Recipe,
    by_torch_alone,
    everywhere,
    training,
)
from tests.support.saving import heard
from tests.support.world import WorldPool

FROZEN: dict[str, list[tuple[str, ...]]] = {
    "a layer is frozen": [(), ("up",), ("up",), ("up",)],
    "a layer is unfrozen": [("up",), ("up",), ("up",), ()],
    "a layer is unfrozen before a save": [("up",), (), (), ()],
    "a layer is frozen for a step": [(), ("head",), (), ()],
    "a module that is sharded by itself is frozen": [(), ("down",), ("down",), ()],
    "a part of it is frozen": [(), ("down.bias",), (), ("down.weight",)],
    "layers take turns": [("up", "norm"), ("down",), ("up", "norm"), ("down",)],
    "all but one is frozen": [
        ("up", "norm", "down", "conv"),
        ("up", "norm", "down", "conv"),
        (),
        (),
    ],
}
"""Which parameters are frozen in each step, by the begins of their names."""


def freeze(pattern: str, model: nn.Module, optimizer: Optimizer, step: int) -> None:
    del optimizer
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(FROZEN[pattern][step] or ("nothing",)))


def momentum(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def adam_by_layers(model: nn.Module) -> Optimizer:
    groups = [{"params": list(each.parameters())} for each in model_of(model).children()]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1)


def model_of(model: nn.Module) -> nn.Module:
    inner = getattr(model, "module", model)
    assert isinstance(inner, nn.Module)
    return inner


WHOLE_AT_SAVE = ["a layer is unfrozen", "a layer is unfrozen before a save", "a layer is frozen"]
CASES = [(momentum, each) for each in FROZEN] + [(adam_by_layers, each) for each in WHOLE_AT_SAVE]


@pytest.mark.parametrize(("optimizer", "pattern"), CASES)
@pytest.mark.corners(pattern=["layers take turns"])
@PLACES
def test_frozen_layers_stay_and_others_are_trained_as_by_torch_alone(
    worlds: WorldPool,
    tmp_path: Path,
    pattern: str,
    optimizer: Callable[[nn.Module], Optimizer],
    places: list[Place],
) -> None:
    recipe = Recipe(
        optimizer=optimizer,
        before=partial(freeze, pattern),
    )
    (expected,) = worlds.run(1, by_torch_alone, recipe)
    stock = [place for place in places if place in STOCK]
    assert everywhere(worlds, recipe, tmp_path, stock) == dict.fromkeys(stock, expected)


@pytest.mark.full
def test_the_norm_is_that_of_the_layers_that_are_trained(worlds: WorldPool, tmp_path: Path) -> None:
    recipe = Recipe(
        optimizer=momentum,
        before=partial(freeze, "layers take turns"),
        max_norm=0.01,
    )
    found = everywhere(worlds, recipe, tmp_path)
    (expected,) = worlds.run(1, by_torch_alone, recipe)
    assert found == dict.fromkeys(STOCK, found["plain", 1]) != dict.fromkeys(STOCK, expected)


@pytest.mark.parametrize(
    "pattern", ["a layer is frozen", "a module that is sharded by itself is frozen"]
)
@pytest.mark.corners(pattern=["a layer is frozen"])
def test_ddp_that_waits_for_a_frozen_layer_is_an_error_with_the_remedy(
    worlds: WorldPool, tmp_path: Path, pattern: str
) -> None:
    recipe = Recipe(optimizer=momentum, before=partial(freeze, pattern), of_wrapper=())
    (found,) = everywhere(worlds, recipe, tmp_path, [("ddp", 2)]).values()
    assert "DistributedDataParallel has not reduced" in found[-1]
    assert "find_unused_parameters=True" in found[-1]
    assert found[:-1] == worlds.run(1, by_torch_alone, recipe)[0][:1]


def frozen_at_first() -> nn.Module:
    model = Net()
    model.up.requires_grad_(False)
    return model


@pytest.mark.full
@pytest.mark.parametrize("back_end", ["ddp", "fsdp2", "plain"])
def test_a_layer_that_is_unfrozen_after_it_was_wrapped_is_trained_or_an_error(
    worlds: WorldPool, tmp_path: Path, back_end: str
) -> None:
    recipe = Recipe(
        model=frozen_at_first,
        optimizer=momentum,
        before=partial(freeze, "a layer is unfrozen before a save"),
    )
    (expected,) = worlds.run(1, by_torch_alone, recipe)
    world = 1 if back_end == "plain" else 2
    (found,) = everywhere(worlds, recipe, tmp_path, [(back_end, world)]).values()
    if back_end == "ddp":
        assert "DistributedDataParallel has not reduced up.weight" in found[-1]
        assert "wrap the model after the last change of requires_grad" in found[-1]
    else:
        assert found == expected


class FreezesInside(nn.Module):
    """Freezes a layer in the second micro-batch of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.calls = nn.Linear(6, 4), nn.Linear(4, 1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            self.up.requires_grad_(False)
        return self.down(self.up(x)).square().mean()


@pytest.mark.full
def test_a_change_in_the_middle_of_a_step_is_an_error(worlds: WorldPool, tmp_path: Path) -> None:
    recipe = Recipe(model=FreezesInside, optimizer=momentum)
    (found,) = everywhere(worlds, recipe, tmp_path, [("plain", 1)]).values()
    assert "requires_grad of up.bias has changed in the middle of a step" in found[0]


def of_the_head(model: nn.Module) -> Optimizer:
    for name, parameter in model_of(model).named_parameters():
        parameter.requires_grad_(name.startswith("head"))
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)


def add_the_rest(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step == 1:
        rest = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        optimizer.add_param_group({"params": [each.requires_grad_() for each in rest]})


def warned_of_groups(back_end: str) -> list[str]:
    with heard(logging.WARNING) as lines:
        own = training(Recipe(optimizer=of_the_head, before=add_the_rest), back_end)
        own.train(3)
        own.close()
    return [line for line in lines if "param group" in line]


@pytest.mark.parametrize("back_end", ["ddp", "fsdp2"])
@pytest.mark.corners(back_end=["fsdp2"])
def test_who_adds_a_param_group_is_warned_once_that_a_resume_needs_it(
    worlds: WorldPool, back_end: str
) -> None:
    (warning,), *others = worlds.run(2, warned_of_groups, back_end)
    assert "must give it this group before it loads" in warning
    assert others == [[]]
