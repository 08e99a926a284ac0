"""`managed_gradient_accumulation: false`: a step ends where the script calls `step()`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.numerics.test_global_batch import round_number
from tests.support.models import Tokens
from tests.support.training import DATASET_SIZE, config, fingerprint, make_engine, train
from tests.support.world import (
    Stages,
    WorldError,
    WorldPool,
    of_stages,
    one_of_stages,
    one_result,
)
from zero_data.ledger import read_ledger, verify
from zero_engine.core.engine import Engine

MICROBATCHES, STEPS = 6, 3
"""Divisible by worlds of 1, 2 and 3; two steps are an epoch."""


def make(size: int = DATASET_SIZE, stage: int = 2, **more: Any) -> Engine:
    settings = {"managed_gradient_accumulation": False, **more}
    return make_engine(config(stage, **settings), training_data=Tokens(size))


def fingerprint_of_managed_steps(stage: int) -> tuple[Any, ...]:
    batch = {"train_batch_size": 2 * MICROBATCHES, "managed_gradient_accumulation": True}
    engine = make(size=4 * MICROBATCHES, stage=stage, **batch)
    train(engine, STEPS)
    return fingerprint(engine)


def fingerprint_of_own_steps(stage: int, scaling: str) -> tuple[Any, ...]:
    engine = make(size=4 * MICROBATCHES, stage=stage, train_batch_size=2 * MICROBATCHES)
    count = MICROBATCHES // engine.world_size
    while engine.global_steps < STEPS:
        for number, batch in enumerate(engine.training_dataloader, 1):
            backward(engine, engine(batch), scaling, count)
            assert not engine.is_gradient_accumulation_boundary()
            if number % count == 0:
                engine.step()
            if engine.global_steps == STEPS:
                break
    assert engine.micro_steps == STEPS * count
    return fingerprint(engine)


def backward(engine: Engine, loss: torch.Tensor, scaling: str, count: int) -> None:
    match scaling:
        case "by the script":
            engine.backward(loss * (1 / count), scale_wrt_gas=False)
        case "by the config's accumulation":
            engine.backward(loss)
        case "plain":
            engine.scale(loss).backward()


@pytest.mark.parametrize("scaling", ["by the script", "by the config's accumulation", "plain"])
@pytest.mark.corners(scaling=["plain"])
@of_stages
def test_the_steps_of_a_script_have_the_bits_of_the_engines_own(
    worlds: WorldPool, stages: Stages, scaling: str
) -> None:
    """1/3 rounds alike in both; the rest of a micro-batch's share is a power of two, or one."""
    ours = one_of_stages(worlds, stages, fingerprint_of_managed_steps)
    assert one_of_stages(worlds, stages, fingerprint_of_own_steps, scaling) == ours


def fingerprint_scaled_by_the_script(stage: int) -> tuple[Any, ...]:
    """In steps of the engine's own."""
    settings = {"train_batch_size": 2 * MICROBATCHES, "managed_gradient_accumulation": True}
    engine = make(size=4 * MICROBATCHES, stage=stage, **settings)
    while engine.global_steps < STEPS:
        for batch in engine.training_dataloader:
            count = engine.gradient_accumulation_steps()
            engine.backward(engine(batch) * (1 / count), scale_wrt_gas=False)
            engine.step()
            if engine.global_steps == STEPS:
                break
    return fingerprint(engine)


@pytest.mark.full
@of_stages
def test_a_script_may_divide_over_the_micro_steps_of_the_engine(
    worlds: WorldPool, stages: Stages
) -> None:
    (ours,) = worlds.run(1, fingerprint_of_managed_steps, 0)
    assert one_of_stages(worlds, stages, fingerprint_scaled_by_the_script) == ours


# ---- what is consumed ----


def test_over_steps_of_any_size_and_resizes_every_sample_is_consumed_exactly_once(
    worlds: WorldPool, tmp_path: Path
) -> None:
    root, ledger = str(tmp_path / "checkpoints"), str(tmp_path / "ledger")
    samples = 0
    for number, world in enumerate([2, 3, 1, 2]):
        (samples, *others) = worlds.run(world, one_round, number, root, ledger)
        assert set(others) <= {samples}
    report = verify(read_ledger(ledger), DATASET_SIZE)
    assert report.problems == ()
    assert (report.samples, report.repeated_steps) == (samples, 3)
    assert samples > 2 * DATASET_SIZE


def one_round(number: int, root: str, ledger: str) -> int:
    """Three steps that a checkpoint keeps, and one that is lost; how many samples in all."""
    with round_number(number):
        engine = make(elastic={"sample_ledger": ledger})
    engine.load_checkpoint(root)
    step_by_step(engine, 3)
    engine.save_checkpoint(root)
    step_by_step(engine, 1)
    engine.destroy()
    return engine.global_samples


def step_by_step(engine: Engine, steps: int) -> None:
    """Steps of one micro-batch, of two, of one, and of all that is left of the epoch."""
    last = engine.global_steps + steps
    while engine.global_steps < last:
        length = len(engine.training_dataloader)
        for number, batch in enumerate(engine.training_dataloader, 1):
            engine.backward(engine(batch))
            if number in (1, 3, 4, length):
                engine.step()
            if engine.global_steps == last:
                break


# ---- what a step is at the end of an epoch ----

SIZE = 21
"""Samples in 11 micro-batches, the last one short; 2 or 4 ranks run a padding one as well."""


@pytest.mark.parametrize("managed", [True, False])
def test_ghosts_and_short_leaves_are_no_part_of_the_mean(worlds: WorldPool, managed: bool) -> None:
    expected = worlds.run(1, managed_step_over_an_epoch)[0]
    for world in (1, 2, 4):
        for found in worlds.run(world, scaled_step_over_an_epoch, managed):
            assert found == pytest.approx(expected, rel=1e-5)


def scaled_step_over_an_epoch(managed: bool) -> tuple[float, float | None]:
    engine = make(size=SIZE, managed_gradient_accumulation=managed, train_batch_size=24)
    for batch in engine.training_dataloader:
        engine.backward(engine(batch) / -(-11 // engine.world_size), scale_wrt_gas=False)
        if managed:
            engine.step()
    if not managed:
        engine.step()
    return engine.mean_loss, engine.get_global_grad_norm()


def test_tokens_count_alike_in_a_step_of_any_size_with_the_same_bits_in_every_world(
    worlds: WorldPool,
) -> None:
    one_result(worlds, step_over_an_epoch, sizes=(1, 2, 4))


def step_over_an_epoch() -> tuple[float, float | None]:
    engine = make(size=SIZE)
    for batch in engine.training_dataloader:
        engine.backward(engine(batch), tokens=batch.numel())
    assert engine.micro_steps == -(-11 // engine.world_size)
    engine.step()
    return engine.mean_loss, engine.get_global_grad_norm()


def managed_step_over_an_epoch() -> tuple[float, float | None]:
    engine = make(size=SIZE, managed_gradient_accumulation=True, train_batch_size=24)
    train(engine, 1)
    return engine.mean_loss, engine.get_global_grad_norm()


# ---- misuse is named ----


def misuse(kind: str) -> None:
    engine = make()
    loader = engine.training_dataloader
    match kind:
        case "no step":
            engine.step()
        case "boundary":
            engine.set_gradient_accumulation_boundary(True)
        case "coalesce":
            with engine.coalesce_grad_reduction():
                pass
        case "next epoch":
            for _ in range(2):
                for batch in loader:
                    engine.backward(engine(batch))
        case "own batches":
            batch = next(iter(loader))
            while True:
                engine.backward(engine(batch))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no step", r"step\(\) without backward\(\): call engine"),
        ("boundary", r"a step ends where step\(\) is called; leave it out"),
        ("coalesce", r"a step ends where step\(\) is called; leave it out"),
        ("next epoch", r"call step\(\) at the end of"),
        ("own batches", r"call step\(\) at the end of"),
    ],
)
def test_what_does_not_go_with_it_is_named(worlds: WorldPool, kind: str, message: str) -> None:
    with pytest.raises(WorldError, match=message):
        worlds.run(1, misuse, kind)


def scale_now_and_then() -> None:
    engine = make()
    for number, batch in enumerate(engine.training_dataloader):
        engine.backward(engine(batch), scale_wrt_gas=number == 0)
    engine.step()


def test_all_losses_of_a_step_are_scaled_by_one_of_the_two(worlds: WorldPool) -> None:
    with pytest.raises(WorldError, match=r"scale_wrt_gas is true in some .* and false in others"):
        worlds.run(1, scale_now_and_then)
