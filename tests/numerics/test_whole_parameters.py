"""Optimizers that look at whole parameters and know nothing of shards: each steps on its owner."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import zero_deepspeed
from tests.support.models import Tokens, make_model, param_groups
from tests.support.plain import plain_torch
from tests.support.training import DATASET_SIZE, config, make_engine, train
from tests.support.world import (
    Stages,
    WorldError,
    WorldPool,
    one_of_stages,
    one_result,
)
from zero_checkpoint import find
from zero_checkpoint.errors import CheckpointError
from zero_contract.errors import ZeroError
from zero_deepspeed.utils import (
    safe_get_full_optimizer_state,
    safe_get_local_optimizer_state,
    safe_set_full_optimizer_state,
    safe_set_local_optimizer_state,
)
from zero_engine.core.engine import Engine

STEPS = 4
STAGES = (0, 1, 2, 3)
ADAFACTOR = {"type": "Adafactor", "params": {"lr": 0.01, "weight_decay": 0.1}}
MATRIX, VECTOR = "blocks.1.up.weight", "blocks.0.norm1.bias"


class Kronecker(torch.optim.Optimizer):
    """A script's own: factors of matrices in a list, the last of them transposed in memory, a
    number of Python's, and steps counted in the groups."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    self.step_one(param, param.grad, group)

    def step_one(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, matrix = self.state[param], gradient.flatten(1) if gradient.dim() > 1 else None
        state["seen"] = state.get("seen", 0) + 1
        if matrix is not None:
            own = [(matrix @ matrix.mT).diagonal(), matrix.square().mean(0, keepdim=True).mT]
            old = state.get("factors", [torch.zeros_like(each) for each in own])
            state["factors"] = [0.5 * a + b for a, b in zip(old, own, strict=True)]
            gradient = gradient / (1e-3 + state["factors"][0].sum() + state["factors"][1].sum())
        rate = group["lr"] / (group["steps"] + state["seen"])
        param.add_(gradient / (1e-3 + gradient.norm()) * param.norm(), alpha=-rate)


def with_object(stage: int, *, seed: int = 7, **more: Any) -> Engine:
    settings = config(stage, gradient_clipping=0, **more)
    del settings["optimizer"]
    model = make_model(seed)
    made = Kronecker(param_groups(model))
    engine, own, *_ = zero_deepspeed.initialize(
        model=model, optimizer=made, config=settings, training_data=Tokens(DATASET_SIZE)
    )
    assert own is made
    return engine


def weights_of_all_stages() -> list[dict[str, Any]]:
    found = []
    for stage in STAGES:
        engine = with_object(stage)
        train(engine, STEPS)
        assert [group["steps"] for group in engine.optimizer.param_groups] == [STEPS, STEPS]
        found.append({key: value.numpy() for key, value in engine.module_state_dict().items()})
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.full
def test_an_optimizer_of_the_script_gives_plain_torchs_bits(worlds: WorldPool, world: int) -> None:
    plain = plain_torch(STEPS, Kronecker, {})
    for rank in worlds.run(world, weights_of_all_stages):
        for state in rank:
            assert [key for key in plain if not np.array_equal(state[key], plain[key])] == []


class FindsItsRate(Kronecker):
    """Has no rate, as transformers' Adafactor with relative steps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group["lr"] = None

    def step_one(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        super().step_one(param, gradient, group | {"lr": 0.1})


def train_without_rates() -> list[float]:
    settings = config(1)
    del settings["optimizer"]
    model = make_model()
    engine, *_ = zero_deepspeed.initialize(
        model=model,
        optimizer=FindsItsRate,
        model_parameters=param_groups(model),
        config=settings,
        training_data=Tokens(DATASET_SIZE),
    )
    train(engine, 2)
    return engine.get_lr()


def test_an_optimizer_may_find_its_own_rate(worlds: WorldPool) -> None:
    for rates in worlds.run(2, train_without_rates):
        assert np.isnan(rates).tolist() == [True, True]


class Signs(torch.optim.Optimizer):
    """A script's own that is elementwise, and says so."""

    needs_whole_parameters = False

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    mean = state.setdefault("mean", torch.zeros_like(param))
                    param.add_(mean.mul_(0.9).add_(param.grad).sign(), alpha=-group["lr"])


def train_signs(path: str) -> dict[str, Any]:
    settings = config(3, gradient_clipping=0)
    del settings["optimizer"]
    nvme = {"device": "nvme", "nvme_path": path}
    settings["zero_optimization"]["offload_optimizer"] = nvme
    model = make_model()
    signs = Signs(param_groups(model))
    engine = make_engine(settings, model=model, optimizer=signs, model_parameters=None)
    train(engine, STEPS)
    return {key: value.numpy() for key, value in engine.module_state_dict().items()}


def test_one_that_says_it_is_elementwise_steps_shards_and_is_offloaded(
    worlds: WorldPool, tmp_path: Path
) -> None:
    plain = plain_torch(STEPS, Signs, {})
    for state in worlds.run(2, train_signs, str(tmp_path)):
        assert [key for key in plain if not np.array_equal(state[key], plain[key])] == []


# ---- single parameters, states moved away ----


def look(stage: int) -> list[Any]:
    engine = make_engine(config(stage, optimizer=ADAFACTOR))
    named = dict(engine.module.named_parameters())
    matrix, vector = named[MATRIX], named[VECTOR]
    before = [safe_get_full_optimizer_state(matrix, "row_var")]
    train(engine, 1)
    keys = ("row_var", "col_var", "step", "variance")
    found = [[safe_get_full_optimizer_state(p, key) for key in keys] for p in (matrix, vector)]
    seen = [[None if each is None else each.tolist() for each in some] for some in found]
    shapes = [[None if each is None else tuple(each.shape) for each in some] for some in found]
    safe_set_full_optimizer_state(matrix, found[0][0] * 4, "row_var")
    share = safe_get_local_optimizer_state(matrix, "col_var")
    safe_set_local_optimizer_state(matrix, share * 2, "col_var")
    train(engine, 2)
    return [before, shapes, seen, engine.weight_hash()]


def test_single_states_are_seen_and_changed_in_their_own_shapes_on_every_rank(
    worlds: WorldPool,
) -> None:
    results = [one_result(worlds, look, stage, sizes=(1, 3)) for stage in (0, 3)]
    assert results[0] == results[1]
    before, shapes, _, changed = results[0]
    assert before == [None]
    assert shapes == [[(144, 1), (1, 36), (), None], [None, None, (), (36,)]]
    assert changed not in worlds.run(1, trained_hash, 2)


def trained_hash(steps: int) -> str:
    engine = make_engine(config(3, optimizer=ADAFACTOR))
    train(engine, steps)
    return engine.weight_hash()


def set_what_is_not_there() -> list[str]:
    engine = make_engine(config(3, optimizer=ADAFACTOR))
    param = dict(engine.module.named_parameters())[MATRIX]
    train(engine, 1)
    told = []
    for key, shape in (("exp_avg", (144, 36)), ("row_var", (144,))):
        with pytest.raises(ZeroError) as caught:
            safe_set_full_optimizer_state(param, torch.zeros(shape), key)
        told.append(str(caught.value))
    return told


def test_setting_a_state_that_is_not_there_or_has_another_shape_is_an_error_on_every_rank(
    worlds: WorldPool,
) -> None:
    absent, reshaped = one_result(worlds, set_what_is_not_there, sizes=(2,))
    assert absent == f"{MATRIX} has no optimizer state 'exp_avg' to set"
    assert reshaped == f"row_var of {MATRIX} has shape (144, 1), the value has (144,)"


def lend_the_device(stage: int) -> str:
    engine = make_engine(config(stage, optimizer=ADAFACTOR))
    train(engine, 1)
    engine.offload_states()
    engine.reload_states()
    train(engine, 3)
    return engine.weight_hash()


def test_states_can_be_moved_away_for_a_while(worlds: WorldPool) -> None:
    lent = {digest for stage in (1, 3) for digest in worlds.run(2, lend_the_device, stage)}
    assert lent == set(worlds.run(1, trained_hash, 3))


class Counts(Signs):
    """Keeps a number that belongs to no parameter, as MADGRAD does."""

    def step(self, closure: Any = None) -> None:
        self.state["k"] = self.state.get("k", 0) + 1
        super().step(closure)


def save_counts(root: str, whole: bool) -> str:
    settings = config(1)
    del settings["optimizer"]
    model = make_model()
    counts = Counts(param_groups(model))
    counts.needs_whole_parameters = whole
    engine = make_engine(settings, model=model, optimizer=counts, model_parameters=None)
    train(engine, 1)
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(root)
    train(engine, 2)
    return str(caught.value)


@pytest.mark.parametrize("whole", [False, True])
def test_a_save_without_the_state_of_no_parameter_is_refused_by_its_name(
    worlds: WorldPool, tmp_path: Path, whole: bool
) -> None:
    """A run that resumed would begin it again."""
    for refused in worlds.run(2, save_counts, str(tmp_path), whole):
        assert "optimizer Counts keeps 'k' in its state, which belongs to no parameter" in refused
    assert not find(tmp_path).candidates


# ---- where state can rest ----


def low_precision(stage: int) -> str:
    settings = config(stage, optimizer=ADAFACTOR)
    settings["bf16"] = {"enabled": True, "bf16_master_weights_and_grads": True}
    engine = make_engine(settings)
    train(engine, 3)
    return engine.weight_hash()


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param({1: (1,), 2: (2,), 3: (3,)}, id="each once"),
        pytest.param(dict.fromkeys((1, 2, 3), (1, 2, 3)), id="all", marks=pytest.mark.full),
    ],
)
def test_weights_may_rest_in_16_bits(worlds: WorldPool, stages: Stages) -> None:
    one_of_stages(worlds, stages, low_precision)


def test_state_in_16_bits_is_refused_with_the_remedy(worlds: WorldPool) -> None:
    low = ("enabled", "bf16_master_weights_and_grads", "bf16_optimizer_states")
    settings = config(2, optimizer=ADAFACTOR) | {"bf16": dict.fromkeys(low, True)}
    refused = "bf16.bf16_optimizer_states: Adafactor is given whole.*; remove the key, or"
    with pytest.raises(WorldError, match=refused):
        worlds.run(1, make, settings)


def make(settings: dict[str, Any]) -> None:
    make_engine(settings)


def train_offloaded(device: str, own: bool, stage: int) -> tuple[str, list[str]]:
    zero = {"stage": stage, "offload_optimizer": {"device": device}}
    caught: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: caught.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("zero_engine")
    logger.addHandler(handler)
    settings = {"zero_optimization": zero}
    engine = (
        with_object(stage, **settings)
        if own
        else make_engine(config(stage, optimizer=ADAFACTOR) | settings)
    )
    logger.removeHandler(handler)
    train(engine, 2)
    return engine.weight_hash(), [each for each in caught if "offload_optimizer" in each]


@pytest.mark.parametrize("own", [False, True], ids=["Adafactor", "of the script"])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.corners(stage=[3])
def test_offload_optimizer_has_no_effect_and_a_warning_says_so(
    worlds: WorldPool, own: bool, stage: int
) -> None:
    (offloaded, told), (other, nothing) = worlds.run(2, train_offloaded, "cpu", own, stage)
    (plain, _), _ = worlds.run(2, train_offloaded, "none", own, stage)
    assert (offloaded, other, nothing) == (plain, plain, [])
    (sentence,) = told
    assert "has no effect: " in sentence
    assert ("set needs_whole_parameters = False" in sentence) == own
