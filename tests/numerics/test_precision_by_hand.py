"""What a script sets by hand: gradients, the dtype of its model, and torch's autocast in fp16."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import zero_deepspeed
from tests.numerics.test_stock_torch import batches, protected
from tests.support.training import config, make_engine, run_micro_step, train
from tests.support.world import WorldError, WorldPool, one_result

STAGES = (0, 1, 2, 3)
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
}


def small_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.ModuleList([nn.Linear(7, 3)])[0])


def value(step: int, name: str) -> float:
    return (step + 1) / 8 * (-1) ** len(name)


def step_by_hand(precision: str) -> list[str]:
    hashes = []
    for stage in STAGES:
        settings = config(stage, gradient_clipping=0) | PRECISIONS[precision]
        settings |= {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1}
        engine, *_ = zero_deepspeed.initialize(model=small_model(), config=settings)
        while engine.global_steps < 3:
            for name, param in engine.module.named_parameters():
                scaled = value(engine.global_steps, name) * engine.loss_scale
                param.grad = torch.full_like(param, scaled)
            engine.step()
        hashes.append(engine.weight_hash())
    return hashes


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.corners(precision=["fp32"])
def test_gradients_by_hand_are_applied_without_a_backward(
    worlds: WorldPool, precision: str
) -> None:
    hashes = one_result(worlds, step_by_hand, precision, sizes=(1, 2))
    assert len(set(hashes)) == 1
    if precision == "fp32":
        assert hashes[0] == plain_hash()


def plain_hash() -> str:
    from zero_checkpoint.state.weight_hash import weight_hash

    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(3):
        for name, param in model.named_parameters():
            param.grad = torch.full_like(param, value(step, name))
        optimizer.step()
    return weight_hash(model.named_parameters())


def overflow_by_hand(_: None) -> list[tuple[float, bool]]:
    settings = config(0) | {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
    settings |= {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1}
    engine, optimizer, *_ = zero_deepspeed.initialize(model=small_model(), config=settings)
    found = []
    for number in (1.0, float("inf"), 1.0, float("nan")):
        for param in engine.module.parameters():
            param.grad = torch.full_like(param, number)
        engine.step()
        found.append((optimizer.cur_scale, optimizer.overflow))
    return found


def test_the_loss_scale_follows_gradients_by_hand(worlds: WorldPool) -> None:
    expected = [(16.0, False), (8.0, True), (8.0, False), (4.0, True)]
    assert worlds.run(1, overflow_by_hand, None) == [expected]


def write_after_a_backward(stage: int) -> None:
    engine = make_engine(config(stage))
    run_micro_step(engine, step=False)
    param = next(engine.module.parameters())
    param.grad = torch.zeros_like(param)
    engine.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_by_hand_beside_those_of_a_backward_is_refused_by_name(
    worlds: WorldPool, stage: int
) -> None:
    with pytest.raises(WorldError, match=r"written to \.grad of .*safe_set_full_grad"):
        worlds.run(1, write_after_a_backward, stage)


# ---- a model in 16 bits ----


def train_in_16_bits(dtype: torch.dtype, section: bool, stage: int) -> tuple[str, float]:
    from tests.support.models import make_model

    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    more: dict[str, Any] = {"enabled": True}
    if dtype == torch.float16:
        more["loss_scale"] = 1.0
    settings = config(stage) | ({names[dtype]: more} if section else {})
    engine = make_engine(settings, model=make_model(7).to(dtype))
    train(engine, 2)
    return engine.weight_hash(), engine.mean_loss


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_model_in_16_bits_needs_no_section(
    worlds: WorldPool, dtype: torch.dtype, stage: int
) -> None:
    (named,) = worlds.run(1, train_in_16_bits, dtype, True, 0)
    assert worlds.run(2, train_in_16_bits, dtype, False, stage) == [named] * 2


# ---- torch's autocast in fp16 ----


def train_autocast(power: int) -> list[tuple[str, float, float]]:
    found = []
    for stage in STAGES:
        settings = config(stage, torch_autocast={"enabled": True, "dtype": "float16"})
        settings |= {"fp16": {"enabled": False, "initial_scale_power": power}}
        engine = make_engine(settings)
        seen: list[torch.dtype] = []
        engine.module.blocks[0].up.register_forward_hook(
            lambda _module, _args, output, seen=seen: seen.append(output.dtype)
        )
        train(engine, 2)
        assert set(seen) == {torch.float16}
        found.append((engine.weight_hash(), engine.mean_loss, engine.loss_scale))
    return found


def test_autocast_in_fp16_scales_the_loss_and_has_one_result(worlds: WorldPool) -> None:
    results = one_result(worlds, train_autocast, 8, sizes=(1, 2))
    assert len(set(results)) == 1
    assert results[0][2] == 2.0**8


def backward_without_scale(_: None) -> None:
    settings = config(0, torch_autocast={"enabled": True, "dtype": "float16"})
    engine = make_engine(settings)
    engine(next(iter(engine.training_dataloader))).backward()


def test_a_loss_without_its_scale_is_refused_under_autocast_in_fp16(worlds: WorldPool) -> None:
    with pytest.raises(WorldError, match=r"engine\.scale\(loss\)\.backward\(\)"):
        worlds.run(1, backward_without_scale, None)


# ---- torch's autocast, which a script opens itself ----

BLOCKS = ("of the loop", "of an evaluation, too", "of each forward")
"""What one block of autocast is around: torch keeps casts of weights until its end."""


@pytest.mark.parametrize("mode", ["error", "off"])
@pytest.mark.parametrize(
    "place", [("plain", 1), *itertools.product(("ddp", "fsdp2"), (1, 2, 3))], ids=str
)
@pytest.mark.corners(mode=["error"], place=[("plain", 1), ("ddp", 2), ("fsdp2", 2)])
def test_weights_in_autocast_are_those_of_the_step_before_however_long_its_block_is(
    worlds: WorldPool, place: tuple[str, int], mode: str
) -> None:
    wrapper, world = place
    (expected,) = worlds.run(1, train_in_blocks, "plain", "of each forward", "off", False)
    for block in BLOCKS:
        found = worlds.run(world, train_in_blocks, wrapper, block, mode, True)
        assert found == [expected] * world, block


def train_in_blocks(wrapper: str, block: str, mode: str, keeps: bool) -> str:
    """The weights; torch `keeps` casts for later forwards, or casts in each one anew."""
    autocast = partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=keeps)
    model, _, run = protected(wrapper, config={"elastic": {"deterministic": mode}})
    try:
        with autocast() if block == "of the loop" else nullcontext():
            for tokens in batches(run):
                with autocast():
                    if block == "of an evaluation, too":
                        model.eval()
                        with torch.no_grad():
                            model(tokens)
                        model.train()
                    loss = model(tokens)
                run.backward(loss)
                run.step()
        return run.weight_hash()
    finally:
        torch.use_deterministic_algorithms(False)
