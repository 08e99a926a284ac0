"""A module that is given to `initialize` once more: the new engine goes on from its weights."""

from __future__ import annotations

import gc
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_deepspeed
import zero_engine
from tests.support.models import Tokens, make_model, param_groups
from tests.support.training import DATASET_SIZE, config, fingerprint, make_engine, train
from tests.support.world import WorldError, WorldPool
from zero_contract.errors import ZeroError
from zero_engine.core.engine import Engine


def engine_for(model: nn.Module, settings: dict[str, Any]) -> Engine:
    """The master weights begin with those that it is given, in full precision."""
    return zero_engine.initialize(
        model,
        config=settings,
        model_parameters=param_groups(model),
        training_data=Tokens(DATASET_SIZE),
    )


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("first", "second"), [(0, 3), (1, 2), (3, 1), (3, 3)])
@pytest.mark.corners(bf16=[True], first=[0, 1])
def test_the_second_engine_trains_what_the_first_has_trained(
    worlds: WorldPool, first: int, second: int, bf16: bool
) -> None:
    for taken_over, anew in worlds.run(2, train_on, first, second, bf16):
        assert taken_over == anew


def train_on(first: int, second: int, bf16: bool) -> tuple[Any, Any]:
    trained = make_engine(config(first, bf16=bf16))
    train(trained, 2)
    copy = make_model()
    copy.load_state_dict(trained.get_fp32_state_dict())
    results = []
    for model in (trained.module, copy):
        engine = engine_for(model, config(second, bf16=bf16))
        train(engine, 3)
        results.append(fingerprint(engine))
    return results[0], results[1]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.rand(8, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) * self.scale).square().mean()


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_frozen_keeps_its_dtype(worlds: WorldPool, stage: int) -> None:
    assert worlds.run(1, take_frozen, stage) == [True]


def take_frozen(stage: int) -> bool:
    model = Scaled()
    scale = model.scale.detach().clone()
    for _ in range(2):
        engine, *_ = zero_deepspeed.initialize(model=model, config=config(stage))
    return torch.equal(engine.module_state_dict()["scale"], scale)


@pytest.mark.parametrize("stage", [2, 3])
def test_it_does_so_when_the_first_is_gone(worlds: WorldPool, stage: int) -> None:
    assert worlds.run(2, train_after_the_end, stage) == [(True, True)] * 2


def train_after_the_end(stage: int) -> tuple[bool, bool]:
    """As Lightning does: it lets go of the engine, and of all hooks of its module."""
    trained = make_engine(config(stage))
    train(trained, 2)
    weights, model = trained.weight_hash(), trained.module
    del trained
    gc.collect()
    for module in model.modules():
        module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()
        module._state_dict_hooks = OrderedDict()
        module._load_state_dict_pre_hooks = OrderedDict()
    testing, *_ = zero_deepspeed.initialize(model=model, config=config(stage) | {"optimizer": None})
    same = testing.weight_hash() == weights
    del testing
    gc.collect()
    engine = engine_for(model, config(stage))
    train(engine, 2)
    return same, engine.global_steps == 2 and engine.weight_hash() != weights


@pytest.mark.parametrize("stage", [1, 3])
def test_the_first_engine_says_so_if_it_is_used_again(worlds: WorldPool, stage: int) -> None:
    [messages] = worlds.run(1, use_the_first_again, stage)
    assert len(messages) == 4
    assert messages[0] == (
        "forward: the module has been given to initialize() once more; use the engine that came "
        "from there"
    )


def use_the_first_again(stage: int) -> list[str]:
    first = make_engine(config(stage))
    second = engine_for(first.module, config(2))
    train(second, 1)
    messages = []
    for use in (
        lambda: first(torch.zeros(1, 13, dtype=torch.int64)),
        first.step,
        first.weight_hash,
        first.module_state_dict,
    ):
        with pytest.raises(ZeroError) as error:
            use()
        messages.append(str(error.value))
    return messages


def test_of_a_module_that_is_divided_a_part_is_not_enough(worlds: WorldPool) -> None:
    message = r"parameter scale is divided, by an engine at stage 3 that is gone; give"
    with pytest.raises(WorldError, match=message):
        worlds.run(1, initialize_part)


def initialize_part() -> None:
    block = make_engine(config(3)).module.blocks[0]
    gc.collect()
    engine_for(block, config(3))


def test_of_a_whole_one_a_part_is_taken(worlds: WorldPool) -> None:
    assert worlds.run(2, take_part) == [(True, False)] * 2


def take_part() -> tuple[bool, bool]:
    engine = make_engine(config(3))
    train(engine, 1)
    whole = engine.module_state_dict()
    part = engine_for(engine.module.blocks[0], config(3))
    same = all(
        torch.equal(value, whole[f"blocks.0.{name}"])
        for name, value in part.module_state_dict().items()
    )
    return same, hasattr(engine.module.position, "ds_id")
