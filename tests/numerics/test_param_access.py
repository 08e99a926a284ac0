"""Parameters, gradients and states, looked at and changed by DeepSpeed's names at every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_deepspeed
from tests.support.models import Tokens
from tests.support.training import config, make_engine, run_micro_step, train
from tests.support.world import (
    Stages,
    WorldError,
    WorldPool,
    of_stages,
    one_of_stages,
    one_result,
)
from zero_contract.errors import ZeroError
from zero_deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from zero_engine.core.engine import Engine

STAGES = (0, 1, 2, 3)
PROBES = ("embed.weight", "blocks.0.qkv.weight", "blocks.1.norm2.bias", "norm.weight")
"""Tied, a matrix, and two of the other param group; one of them in the root."""


def probes(engine: Engine) -> list[nn.Parameter]:
    named = dict(engine.module.named_parameters())
    return [named[name] for name in PROBES]


def numbers(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.tolist()


# ---- looking at parameters, gradients and optimizer state ----


def look(stage: int, bf16: bool) -> list[Any]:
    """Everything that can be read of the probes, before, between and after."""
    return look_at(make_engine(config(stage, bf16=bf16)))


def look_at(engine: Engine) -> list[Any]:
    seen: list[Any] = [[numbers(safe_get_full_fp32_param(p)) for p in probes(engine)]]
    seen.append([safe_get_full_optimizer_state(p, "exp_avg") for p in probes(engine)])
    seen.append([safe_get_full_grad(p) for p in probes(engine)])
    train(engine, 1)
    run_to_the_last_micro_step(engine)
    seen.append([numbers(safe_get_full_grad(p)) for p in probes(engine)])
    engine.step()
    seen += [
        [numbers(safe_get_full_optimizer_state(p, key)) for p in probes(engine)]
        for key in ("exp_avg", "exp_avg_sq", "step")
    ]
    seen.append([numbers(safe_get_full_fp32_param(p)) for p in probes(engine)])
    return seen


def run_to_the_last_micro_step(engine: Engine) -> None:
    """All of a step but its end: the whole gradient is there."""
    while not engine.is_gradient_accumulation_boundary():
        run_micro_step(engine, step=True)
    run_micro_step(engine, step=False)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.corners(bf16=[True])
@of_stages
def test_what_is_seen_of_a_parameter_is_the_same_at_every_stage_and_world(
    worlds: WorldPool, stages: Stages, bf16: bool
) -> None:
    before, no_state, no_gradient, gradient, *state, after = one_of_stages(
        worlds, stages, look, bf16
    )
    assert no_state == no_gradient == [None] * len(PROBES)
    assert state[-1] == [2.0] * len(PROBES)
    assert before != after
    assert all(any(torch.tensor(each).flatten().tolist()) for each in gradient)


@pytest.mark.parametrize("stage", STAGES)
def test_shares_are_the_pieces_of_the_whole(worlds: WorldPool, stage: int) -> None:
    """In the order of the shards, which are not those of the ranks where nodes have several."""
    ranks = worlds.run(3, shares, stage)
    owners = ranks[0][2]
    for index in range(len(PROBES)):
        for kind in range(3):
            whole = ranks[0][0][index][kind]
            parts = [number for owner in owners for number in ranks[owner][1][index][kind]]
            assert parts == torch.tensor(whole).flatten().tolist()


def shares(stage: int) -> tuple[Any, Any, Any]:
    engine = make_engine(config(stage))
    train(engine, 1)
    run_micro_step(engine, step=False)
    whole, local = [], []
    for p in probes(engine):
        full = (safe_get_full_fp32_param(p), safe_get_full_grad(p))
        whole.append([numbers(t) for t in (*full, safe_get_full_optimizer_state(p, "exp_avg"))])
        mine = (safe_get_local_fp32_param(p), safe_get_local_grad(p))
        state = safe_get_local_optimizer_state(p, "exp_avg")
        if stage == 0 and engine.world_size > 1:
            assert state.numel() == mine[0].numel()
        local.append([numbers(t) for t in (*mine, state)])
    return whole, local, engine._core.collectives.owners


def counts(stage: int, name: str) -> list[tuple[float, float, str]]:
    """The count of steps as it is seen whole and in a share, and why it cannot be set."""
    engine = make_engine(config(stage, optimizer={"type": name}))
    train(engine, 2)
    found = []
    for p in probes(engine):
        seen = [
            get(p, "step")
            for get in (safe_get_full_optimizer_state, safe_get_local_optimizer_state)
        ]
        shown = [float(each) for each in seen]
        for each in seen:
            if isinstance(each, Tensor):
                each.zero_()  # of a copy
        told = ""
        for change in (safe_set_full_optimizer_state, safe_set_local_optimizer_state):
            with pytest.raises(ZeroError) as caught:
                change(p, torch.tensor(9.0), "step")
            told = str(caught.value)
        found.append((shown[0], shown[1], told.split(" optimizer state ")[-1]))
    return found


@pytest.mark.parametrize("name", ["AdamW", "Lamb"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.corners(name=["AdamW"], stage=[0, 3])
def test_a_count_of_steps_is_seen_in_a_share_as_in_the_whole(
    worlds: WorldPool, stage: int, name: str
) -> None:
    for rank in worlds.run(3, counts, stage, name):
        assert rank == [(2.0, 2.0, "'step' to set; it has: exp_avg, exp_avg_sq")] * len(PROBES)


# ---- changing them ----


def change_and_train(stage: int, bf16: bool, how: str) -> tuple[Any, ...]:
    """Change weights, gradient and moments of the probes in the middle of a run."""
    engine = make_engine(config(stage, bf16=bf16))
    train(engine, 1)
    for p in probes(engine):
        change_weights(p, how)
        change_moments(p, how)
    evaluated = evaluate(engine)
    run_to_the_last_micro_step(engine)
    for p in probes(engine):
        change_gradient(p, how)
    engine.step()
    train(engine, 3)
    return evaluated, engine.weight_hash()


def change_weights(param: nn.Parameter, how: str) -> None:
    if how == "whole":
        safe_set_full_fp32_param(param, safe_get_full_fp32_param(param) * 0.5 + 0.01)
    elif how == "share":
        safe_set_local_fp32_param(param, safe_get_local_fp32_param(param) * 0.5 + 0.01)


def change_moments(param: nn.Parameter, how: str) -> None:
    if how == "whole":
        value = safe_get_full_optimizer_state(param, "exp_avg") * 2
        safe_set_full_optimizer_state(param, value, "exp_avg")
        assert numbers(safe_get_full_optimizer_state(param, "exp_avg")) == numbers(value)
    elif how == "share":
        share = safe_get_local_optimizer_state(param, "exp_avg")
        safe_set_local_optimizer_state(param, share * 2, "exp_avg")


def change_gradient(param: nn.Parameter, how: str) -> None:
    gradient = safe_get_full_grad(param)
    assert gradient is not None
    if how == "whole":
        safe_set_full_grad(param, gradient * 4)
        assert numbers(safe_get_full_grad(param)) == numbers(gradient * 4)
    elif how == "share":
        share = safe_get_local_grad(param)
        assert share is not None
        safe_set_local_grad(param, share * 4)


def evaluate(engine: Engine) -> float:
    engine.eval()
    with torch.no_grad():
        loss = float(engine(torch.stack([Tokens(3)[i] for i in range(3)])))
    engine.train()
    return loss


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.full
def test_a_change_reaches_the_next_forward_and_the_next_step_at_every_stage(
    worlds: WorldPool, bf16: bool
) -> None:
    results = {
        how: {
            one_result(worlds, change_and_train, stage, bf16, how, sizes=(1, 2)) for stage in STAGES
        }
        for how in ("whole", "share", "not at all")
    }
    assert len(results["whole"]) == 1
    assert results["whole"] == results["share"]
    (changed,), (unchanged,) = results["whole"], results["not at all"]
    assert changed[0] != unchanged[0]
    assert changed[1] != unchanged[1]


def test_fp16_gradients_are_seen_without_the_loss_scale(worlds: WorldPool) -> None:
    (small, large), *_ = worlds.run(1, gradients_at_scales, (4, 8))
    assert small == large


def gradients_at_scales(powers: tuple[int, ...]) -> list[Any]:
    seen = []
    for power in powers:
        torch.manual_seed(0)
        fp16 = {"enabled": True, "initial_scale_power": power, "auto_cast": True}
        settings = {"train_micro_batch_size_per_gpu": 2, "fp16": fp16, "optimizer": {"type": "SGD"}}
        engine, *_ = zero_deepspeed.initialize(model=nn.Linear(4, 1), config=settings)
        engine.backward(engine(torch.ones(2, 4)).float().square().mean())
        seen.append(numbers(safe_get_full_grad(engine.module.weight)))
    return seen


def weights_of_a_frozen_one(stage: int) -> tuple[Any, Any]:
    frozen = make_engine(config(stage)).module.blocks[0].scale
    assert not frozen.requires_grad
    return safe_get_full_fp32_param(frozen), safe_get_local_fp32_param(frozen)


@pytest.mark.parametrize("stage", STAGES)
def test_a_frozen_parameter_has_no_weights_in_the_highest_precision(
    worlds: WorldPool, stage: int
) -> None:
    assert worlds.run(1, weights_of_a_frozen_one, stage) == [(None, None)]


def misuse(kind: str) -> None:
    engine = make_engine(config(2))
    param = engine.module.norm.weight
    match kind:
        case "foreign":
            safe_get_full_fp32_param(nn.Parameter(torch.zeros(3)))
        case "shape":
            safe_set_full_fp32_param(param, torch.zeros(3))
        case "no gradient":
            safe_set_full_grad(param, torch.zeros(36))
        case "no state":
            safe_set_full_optimizer_state(param, torch.zeros(36), "exp_avg")
        case "no_sync":
            with engine.no_sync():
                pass
        case "batch":
            engine.set_train_batch_size(7)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("foreign", r"shape \(3,\) belongs to no engine; pass one of the module"),
        ("shape", r"norm.weight has shape \(36,\), the value has \(3,\)"),
        ("no gradient", "norm.weight has no gradient to set; call this between"),
        ("no state", "no optimizer state 'exp_avg' to set; it has: none before the first step"),
        (
            "no_sync",
            "no_sync context manager is incompatible with the sharded gradients of ZeRO stage 2",
        ),
        ("batch", "7.: not a multiple of the micro-batch size 2"),
    ],
)
def test_what_cannot_be_done_is_named(worlds: WorldPool, kind: str, message: str) -> None:
    with pytest.raises(WorldError, match=message):
        worlds.run(2, misuse, kind)


# ---- zero.* ----


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.corners(bf16=[True])
@of_stages
def test_changes_inside_gathered_parameters_are_those_of_the_modifier_everywhere(
    worlds: WorldPool, stages: Stages, bf16: bool
) -> None:
    of_worlds = {2: stages[1] + stages.get(2, ()), 3: stages[3]}
    before, after, kept = one_of_stages(worlds, of_worlds, modify_gathered, bf16)
    assert before != after
    # One element was changed; the fp32 weights of the others are what they were.
    assert kept == 1


def modify_gathered(stage: int, bf16: bool) -> tuple[str, str, int]:
    engine = make_engine(config(stage, bf16=bf16))
    train(engine, 1)
    before = engine.weight_hash()
    block = engine.module.blocks[0]
    weight = block.qkv.weight
    master = safe_get_full_fp32_param(weight)
    with zero_deepspeed.zero.GatheredParameters(weight, modifier_rank=1), torch.no_grad():
        assert weight.shape == (108, 36)
        if engine.global_rank == 1:
            weight[3, 4] = 7.0
    changed = int((safe_get_full_fp32_param(weight) != master).sum())
    assert safe_get_full_fp32_param(weight)[3, 4] == 7.0
    with zero_deepspeed.zero.GatheredParameters(block):  # frozen ones, too
        assert all(torch.isfinite(p).all() for p in block.parameters())
    train(engine, 2)
    return before, engine.weight_hash(), changed


class Borrower(nn.Module):
    """Its blocks multiply with each other's weights."""

    def __init__(self, register: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        if register:
            zero_deepspeed.zero.register_external_parameter(self, self.blocks[1].weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x) @ self.blocks[1].weight
        return self.blocks[1](x).square().mean()


def test_a_registered_external_parameter_is_there_for_every_module(worlds: WorldPool) -> None:
    hashes = one_result(worlds, train_borrower, sizes=(1, 2))
    assert len(set(hashes)) == 1


def train_borrower() -> list[str]:
    hashes = []
    for stage in STAGES:
        torch.manual_seed(0)
        with zero_deepspeed.zero.Init(config_dict_or_path=config(stage), enabled=stage == 3):
            model = Borrower(register=True)
        settings = config(stage, train_batch_size=4, train_micro_batch_size_per_gpu=2)
        engine, *_ = zero_deepspeed.initialize(model=model, config=settings)
        for step in range(3):
            while engine.global_steps == step:
                engine.backward(engine(torch.full((2, 8), 0.1 * step)))
                engine.step()
        hashes.append(engine.weight_hash())
    return hashes
