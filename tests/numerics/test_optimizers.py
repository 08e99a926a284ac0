"""Optimizers and schedules of the config: one result on whole parameters and on shards."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zero_deepspeed
from tests.support.training import config, make_engine, train
from tests.support.world import WorldError, WorldPool
from zero_engine.config import OptimizerConfig
from zero_engine.optim.lamb import Lamb
from zero_engine.optim.lion import Lion
from zero_engine.optim.optimizers import make_optimizer
from zero_engine.optim.whole import Itself
from zero_step.record import name_of

STAGES = (0, 1, 2, 3)
STEPS = 4


@pytest.mark.parametrize(
    "optimizer",
    [
        {"type": "Lion", "params": {"lr": 1e-3, "betas": [0.95, 0.98]}},
        {"type": "Lamb", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        {"type": "Muon", "params": {"lr": "auto", "nesterov": False, "ns_steps": 7}},
        {"type": "RMSprop", "params": {"lr": 1e-3, "momentum": 0.9, "centered": True}},
        {"type": "NAdam", "params": {"lr": "auto"}},
        {"type": "rprop", "params": {"lr": 1e-3}},
    ],
    ids=lambda optimizer: optimizer["type"],
)
@pytest.mark.full
def test_every_optimizer_gives_one_result_at_every_stage_and_world_size(
    worlds: WorldPool, optimizer: dict[str, Any]
) -> None:
    ranks = [*worlds.run(1, hashes, optimizer), *worlds.run(3, hashes, optimizer)]
    assert len({digest for rank in ranks for digest in rank}) == 1


def hashes(optimizer: dict[str, Any]) -> list[str]:
    found = []
    for stage in STAGES:
        engine = make_engine(config(stage, optimizer=optimizer))
        train(engine, STEPS)
        found.append(engine.weight_hash())
    return found


@pytest.mark.parametrize("name", ["Lion", "Lamb"])
def test_on_shards_it_computes_what_it_computes_on_whole_parameters(
    worlds: WorldPool, name: str
) -> None:
    ours = worlds.run(2, train_on_shards, name)[0]
    theirs = train_on_whole_parameters(name)
    for key, value in ours.items():
        np.testing.assert_allclose(value, theirs[key], rtol=2e-6, atol=1e-8)


OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    # The first matrix does not fit into one rank's shard.
    return nn.Sequential(nn.Linear(40, 70), nn.Tanh(), nn.Linear(70, 3))


def batch(step: int, microbatch: int) -> Tensor:
    return torch.randn(2, 40, generator=torch.Generator().manual_seed(10 * step + microbatch))


def train_on_shards(name: str) -> dict[str, Any]:
    settings = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0}
    settings |= {"zero_optimization": {"stage": 3}, "optimizer": {"type": name, "params": OPTIONS}}
    engine, *_ = zero_deepspeed.initialize(model=net(), config=settings)
    for step in range(STEPS):
        engine.backward(engine(batch(step, engine.global_rank)).square().mean())
        engine.step()
    return {name: value.numpy() for name, value in engine.module_state_dict().items()}


def train_on_whole_parameters(name: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = net()
    optimizer = {"Lion": Lion, "Lamb": Lamb}[name](model.parameters(), **OPTIONS)
    for step in range(STEPS):
        optimizer.zero_grad()
        for microbatch in range(2):
            (model(batch(step, microbatch)).square().mean() / 2).backward()
        optimizer.step()
    return {name: value.numpy() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.corners(stage=[0, 3])
def test_with_eps_0_weights_stay_finite_where_gradients_are_not_zero(
    worlds: WorldPool, stage: int
) -> None:
    assert set().union(*worlds.run(2, not_finite_with_eps_0, stage)) == set()


def not_finite_with_eps_0(stage: int) -> set[str]:
    found = set()
    for name in ("Lamb", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad"):
        torch.manual_seed(0)
        # Units are padded, and the gradient of padding is zero.
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
        settings = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": name, "params": {"lr": 0.1, "eps": 0.0}},
        }
        engine, *_ = zero_deepspeed.initialize(model=model, config=settings)
        for _ in range(2):
            engine.backward(engine(torch.rand(2, 3) + 1).square().mean())
            engine.step()
        if not all(value.isfinite().all() for value in engine.module_state_dict().values()):
            found.add(name)
    return found


def test_lamb_with_eps_0_leaves_a_weight_without_gradient_where_it_is() -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    weight.grad = torch.tensor([0.5, 0.0])
    Lamb([weight], lr=0.1, eps=0.0).step()
    assert weight.isfinite().all()
    assert weight[1] == 4


def test_lambs_step_is_the_papers_in_one_dimension() -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    weight.grad = torch.tensor([0.5, 0.0])
    Lamb([weight], lr=0.1, eps=0.0001, bias_correction=False, betas=(0.0, 0.0)).step()
    # The direction has length 1, the weight 5: a step of 0.1 * 5 along it.
    assert weight.tolist() == pytest.approx([3.0 - 0.5 * 5000 / 5001 * 5001 / 5000, 4.0], abs=1e-3)


def test_lambs_step_behind_one_that_has_failed_half_way_is_what_it_would_have_been() -> None:
    """A checkpoint is loaded between the two, which brings back weights and state."""
    start, gradient = torch.tensor([3.0, 4.0]), torch.tensor([0.5, 0.1])
    weights = []
    for fails in (False, True):
        weight = nn.Parameter(start * (1 + fails))
        optimizer = Lamb([weight], lr=0.1)
        if fails:
            weight.grad, optimizer.whole = gradient.clone(), NoMemory()
            with pytest.raises(MemoryError):
                optimizer.step()
            optimizer.whole, weight.data = Itself(), start.clone()
            optimizer.state.clear()
        weight.grad = gradient.clone()
        optimizer.step()
        weights.append(weight.tolist())
    assert weights[0] == weights[1] != start.tolist()


class NoMemory(Itself):
    def direction(self, param: Tensor) -> Tensor | None:
        raise MemoryError


def test_a_copy_of_an_optimizer_steps_as_the_original_does() -> None:
    original = Lamb([nn.Parameter(torch.tensor([3.0, 4.0]))], lr=0.1)
    copied = copy.deepcopy(original)
    weights = []
    for optimizer in (original, copied):
        (weight,) = optimizer.param_groups[0]["params"]
        weight.grad = torch.tensor([0.5, 0.1])
        optimizer.step()
        weights.append(weight.tolist())
    assert weights[0] == weights[1] != [3.0, 4.0]


def test_lion_steps_by_the_sign_and_decays_the_weight() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -1.0]))
    weight.grad = torch.tensor([0.3, -7.0])
    Lion([weight], lr=0.1, weight_decay=0.5).step()
    assert weight.tolist() == pytest.approx([0.95 - 0.1, -0.95 + 0.1])


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            {"type": "LBFGS"},
            "optimizer LBFGS calls the model again within a step, and sees all parameters as one",
        ),
        ({"type": "OneBitAdam"}, "optimizer.type: 'OneBitAdam' does not exist here, and DeepSpeed"),
        ({"type": "MuAdam"}, "optimizer.type: 'MuAdam' is of the package mup: pip install mup"),
        ({"type": "Adamm"}, "optimizer.type: 'Adamm' is unknown; known: adadelta, adafactor, adag"),
        ({"type": "Lion", "params": {"lr": -1}}, "optimizer.params of Lion: Lion: lr -1"),
        ({"type": "Adam", "params": {"max_grad_norm": 1}}, "write it as gradient_clipping"),
        (
            {"type": "SGD", "params": {"rate": 1}},
            "optimizer.params.rate: unknown key; known",
        ),
        (
            {"type": "AdamW", "params": {"lr": "fast"}},
            "optimizer.params.lr: 'fast' is not a number",
        ),
        (
            {"type": "Lion", "params": {"lr": float("nan")}},
            "optimizer.params.lr: nan is not a number",
        ),
    ],
)
def test_an_optimizer_that_cannot_be_made_is_named(
    worlds: WorldPool, optimizer: dict[str, Any], message: str
) -> None:
    with pytest.raises(WorldError, match=message.replace("(", r"\(")):
        worlds.run(1, hashes, optimizer)


MOMENTS = {"betas": (0.9, 0.999), "eps": 1e-8}
DEFAULTS: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("Adam", {}, "AdamW", {"lr": 1e-3, "weight_decay": 0.0} | MOMENTS),
    ("Adam", {"bias_correction": True}, "AdamW", {"weight_decay": 0.0}),
    ("Adam", {"adam_w_mode": False}, "Adam", {"weight_decay": 0.0} | MOMENTS),
    ("Adam", {"adam_w_mode": False, "torch_adam": True}, "Adam", {"weight_decay": 0.0}),
    ("Adam", {"torch_adam": True}, "AdamW", {"weight_decay": 0.01} | MOMENTS),
    ("AdamW", {"torch_adam": False}, "AdamW", {"weight_decay": 0.0} | MOMENTS),
    ("AdamW", {"torch_adam": True, "weight_decay": 0.3}, "AdamW", {"weight_decay": 0.3}),
    ("AdamW", {"betas": ["0.9", 0.95]}, "AdamW", {"betas": (0.9, 0.95)}),
    ("Adagrad", {}, "Adagrad", {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0}),
    ("Lion", {}, "Lion", {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}),
    ("Lamb", {}, "Lamb", {"lr": 1e-3, "weight_decay": 0.0, "bias_correction": True} | MOMENTS),
    ("Lamb", {}, "Lamb", {"max_coeff": 10.0, "min_coeff": 0.01}),
    ("Muon", {}, "Muon", {"lr": 0.02, "momentum": 0.95, "ns_method": "gram", "weight_decay": 0}),
]
"""Type and params in the config, and the class and options that DeepSpeed makes of them."""


@pytest.mark.parametrize(("name", "params", "made", "options"), DEFAULTS)
def test_what_the_config_leaves_out_is_as_in_deepspeed(
    name: str, params: dict[str, Any], made: str, options: dict[str, Any]
) -> None:
    optimizer = make_optimizer(None, OptimizerConfig(type=name, params=params), None, net())
    assert optimizer is not None
    assert name_of(optimizer) == made
    group = optimizer.param_groups[0]
    assert {key: group[key] for key in options} == options


# ---- schedules ----

WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear"}}


def test_a_schedule_of_the_config_moves_every_group_and_goes_on_after_a_restart(
    worlds: WorldPool, tmp_path: Path
) -> None:
    root = str(tmp_path)
    whole = worlds.run(1, rates_to, 5, None, None)[0]
    worlds.run(2, rates_to, 2, None, root)
    resumed = worlds.run(1, rates_to, 5, root, None)[0]
    parts = (0, 1 / 3, 2 / 3, 1, 1)
    assert whole[0] == [pytest.approx([0.01 * part, 0.005 * part]) for part in parts]
    assert resumed == (whole[0][2:], whole[1])


def rates_to(steps: int, load: str | None, save: str | None) -> tuple[list[Any], str]:
    engine = make_engine(config(3, scheduler=WARMUP))
    assert type(engine.lr_scheduler).__name__ == "WarmupLR"
    if load:
        engine.load_checkpoint(load)
    rates = []
    for step in range(engine.global_steps + 1, steps + 1):
        train(engine, step)
        rates.append(engine.get_lr())
    if save:
        engine.save_checkpoint(save)
    return rates, engine.weight_hash()
