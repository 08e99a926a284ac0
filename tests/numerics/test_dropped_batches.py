"""Every way to leave a batch out of a step, at every stage: it is as if it had not been there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import zero_deepspeed
from tests.support.world import WorldPool, one_result
from zero_deepspeed import DeepSpeedEngine

SIZE = 8


def make(stage: int, dtype: str, accumulation: int = 1, **more: Any) -> DeepSpeedEngine:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, 1))
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        dtype: {"enabled": True},
        "fp16" if dtype == "bf16" else "bf16": {"enabled": False},
    }
    engine, *_ = zero_deepspeed.initialize(model=model, config=settings, **more)
    return engine


def run(engine: DeepSpeedEngine, number: int) -> None:
    """The backward of a batch; number 0 is the one to drop."""
    torch.manual_seed(number + 10 * engine.global_rank)
    dtype = next(engine.module.parameters()).dtype
    batch = torch.randn(2, SIZE) + (0.0 if number else 5.0)
    engine.backward(engine(batch.to(dtype)).square().mean())


def without_step(engine: DeepSpeedEngine, drops: bool) -> None:
    if drops:
        run(engine, 0)
        engine.zero_grad()
    run(engine, 1)
    engine.step()


def after_several_backwards(engine: DeepSpeedEngine, drops: bool) -> None:
    if drops:
        run(engine, 0)
        run(engine, 0)
        engine.zero_grad()
    without_step(engine, False)


def in_no_sync(engine: DeepSpeedEngine, drops: bool) -> None:
    context = nullcontext() if engine.zero_optimization_stage() > 1 else engine.no_sync()
    with context:
        for _ in range(3 if drops else 0):
            run(engine, 0)
    engine.zero_grad()
    without_step(engine, False)


def within_no_sync(engine: DeepSpeedEngine, drops: bool) -> None:
    if engine.zero_optimization_stage() > 1:
        return without_step(engine, drops)
    with engine.no_sync():
        if drops:
            run(engine, 0)
            engine.zero_grad()
        run(engine, 1)
        run(engine, 2)
    engine.step()
    return None


def before_any(engine: DeepSpeedEngine, drops: bool) -> None:
    if drops:
        engine.zero_grad()
    without_step(engine, False)


def at_the_end(engine: DeepSpeedEngine, drops: bool) -> None:
    """The loop ends with a batch that is dropped."""
    without_step(engine, False)
    if drops:
        run(engine, 0)
        engine.zero_grad()


WAYS: dict[str, Callable[[DeepSpeedEngine, bool], Any]] = {
    way.__name__: way
    for way in (
        without_step,
        after_several_backwards,
        in_no_sync,
        within_no_sync,
        before_any,
        at_the_end,
    )
}


def pairs(dtype: str, stages: int) -> dict[str, Any]:
    """By way and some stages, the weights with a dropped batch and without it."""
    found = {}
    for number, (name, way) in enumerate(WAYS.items()):
        for stage in [each % 4 for each in range(number, number + stages)]:
            hashes = []
            for drops in (True, False):
                engine = make(stage, dtype)
                way(engine, drops)
                way(engine, drops)
                hashes.append(engine.weight_hash())
            found[f"{name} {stage}"] = hashes
    return found


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.corners(dtype=["fp16"], stages=[1])
def test_a_dropped_batch_of_the_script_leaves_the_weights_of_a_run_without_it(
    worlds: WorldPool, dtype: str, stages: int
) -> None:
    """Each way at one stage, and each stage; or all of them."""
    for found in worlds.run(2, pairs, dtype, stages):
        assert {name for name, (dropped, without) in found.items() if dropped != without} == set()


def accumulating(drops: bool, how: str) -> list[str]:
    """By stage: of four micro-steps the first two are dropped, or are multiplied with zero."""
    hashes = []
    for stage in range(4):
        engine = make(stage, "bf16", accumulation=4)
        with engine.coalesce_grad_reduction() if how == "coalesce" else nullcontext():
            for number in (1, 2, 3, 4):
                dropped = number < 3
                torch.manual_seed(number + 10 * engine.global_rank)
                batch = torch.randn(2, SIZE, dtype=torch.bfloat16)
                loss = engine(batch).square().mean()
                engine.backward(loss * 0.0 if dropped and not drops else loss)
                if how == "steps":
                    engine.step()
                if number == 2 and drops:
                    engine.zero_grad()
            if how == "coalesce":
                assert engine.global_steps == 0
        if how == "coalesce":
            engine.step()
        assert engine.global_steps == 1
        hashes.append(engine.weight_hash())
    return hashes


@pytest.mark.parametrize("how", ["steps", "coalesce"])
@pytest.mark.corners(how=["coalesce"])
def test_dropped_micro_steps_of_an_accumulation_add_nothing_to_it(
    worlds: WorldPool, how: str
) -> None:
    dropped = one_result(worlds, accumulating, True, how, sizes=(2,))
    assert dropped == one_result(worlds, accumulating, False, how, sizes=(2,))
    assert len(set(dropped)) == 1


def with_the_engines_loader(stage: int) -> tuple[int, bool]:
    """A step of which the only batch is dropped: counted, and it changes nothing."""
    data = [torch.full((SIZE,), float(n), dtype=torch.bfloat16) for n in range(8)]
    engine = make(stage, "bf16", training_data=data)
    before = engine.weight_hash()
    engine.backward(engine(next(iter(engine.training_dataloader))).square().mean())
    engine.zero_grad()
    engine.step()
    return engine.global_samples, engine.weight_hash() == before


def at_stages(_: None) -> list[tuple[int, bool]]:
    return [with_the_engines_loader(stage) for stage in range(4)]


def test_a_dropped_batch_of_the_engines_loader_is_counted_and_changes_nothing(
    worlds: WorldPool,
) -> None:
    assert one_result(worlds, at_stages, None, sizes=(2,)) == [(4, True)] * 4
