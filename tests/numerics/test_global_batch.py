"""Which samples make a step, at every world size; and the ledger that proves it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import zero_deepspeed
from tests.support.training import DATASET_SIZE, config, make_engine, train
from tests.support.world import WorldPool, one_result
from zero_data.ledger import read_ledger, verify

STEPS = 4
STAGES = (0, 1, 2, 3)


# ---- the global batch ----


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ghosts_and_the_short_last_step_are_counted_right(worlds: WorldPool, world: int) -> None:
    """23 samples: steps of 10, 10 and 3, in 5, 5 and 2 micro-batches."""
    expected = {1: [5, 5, 2], 2: [3, 3, 1], 4: [2, 2, 1]}[world]
    assert (
        worlds.run(world, count_micro_steps)
        == [(expected, [10, 20, 23, 33], sum(expected), [0, 0, 1, 1])] * world
    )


def count_micro_steps() -> tuple[Any, ...]:
    engine = make_engine(config(2))
    loader = engine.training_dataloader
    per_step, positions, epochs, length = [], [], [], len(loader)
    while len(positions) < 4:
        for batch in loader:
            boundary, before = engine.is_gradient_accumulation_boundary(), engine.global_steps
            engine.backward(engine(batch))
            engine.step()
            assert boundary == (engine.global_steps > before)
            if boundary:
                per_step.append(engine.micro_steps - sum(per_step))
                positions.append(engine.global_samples)
                epochs.append(loader.epoch)
            if len(positions) == 4:
                break
    return per_step[:3], positions, length, epochs


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.corners(world=[2])
def test_a_loop_that_is_left_and_entered_again_goes_on_where_it_was(
    worlds: WorldPool, world: int
) -> None:
    """Even in the middle of a step, and with batches prefetched by worker processes."""
    expected = one_result(worlds, train_in_fragments, 0, sizes=(3,))
    assert worlds.run(world, train_in_one_go, 2) == [expected] * world


def train_in_fragments(num_workers: int) -> str:
    engine = make_engine(config(2), num_workers=num_workers)
    while engine.global_steps < STEPS:
        batch = next(iter(engine.training_dataloader))
        engine.backward(engine(batch))
        engine.step()
    return engine.weight_hash()


def train_in_one_go(num_workers: int) -> str:
    engine = make_engine(config(2), num_workers=num_workers)
    train(engine, STEPS)
    return engine.weight_hash()


def test_the_tail_of_an_epoch_is_dropped_on_request(worlds: WorldPool) -> None:
    assert worlds.run(2, count_dropped) == [(2, 20, 30)] * 2


def count_dropped() -> tuple[int, int, int]:
    engine = make_engine(config(1, dataloader_drop_last=True))
    for batch in engine.training_dataloader:
        engine.backward(engine(batch))
        engine.step()
    first = engine.global_steps, engine.global_samples
    train(engine, 3)
    return *first, engine.global_samples


class Noisy(Dataset[Tensor]):
    """Samples with augmentation: random numbers drawn while loading."""

    def __len__(self) -> int:
        return DATASET_SIZE

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(4) + index


@pytest.mark.full
def test_random_augmentation_does_not_depend_on_who_loads_a_sample(worlds: WorldPool) -> None:
    assert one_result(worlds, train_on_noise, 0) == one_result(worlds, train_on_noise, 1)


def train_on_noise(num_workers: int) -> str:
    torch.manual_seed(0)
    engine, _, loader, _ = zero_deepspeed.initialize(
        model=nn.Linear(4, 1),
        training_data=Noisy(),
        config=config(2),
        num_workers=num_workers,
    )
    for batch in loader:
        engine.backward(engine(batch).square().mean())
        engine.step()
    return engine.weight_hash()


def test_data_of_the_users_own_works_without_our_loader(worlds: WorldPool) -> None:
    """Every rank feeds its micro-batches; full steps, each micro-batch weighted alike."""
    found = one_result(worlds, train_on_own_data, sizes=(1, 2, 4))
    assert re.fullmatch(r"v2:[0-9a-f]{64}", found)


def train_on_own_data() -> str:
    torch.manual_seed(0)
    engine, _, loader, _ = zero_deepspeed.initialize(model=nn.Linear(4, 1), config=config(1))
    assert loader is None
    rank, world, microbatches = engine.global_rank, engine.world_size, 5
    for step in range(3):
        for micro in range(engine.gradient_accumulation_steps()):
            microbatch = min(micro * world + rank, microbatches - 1)
            batch = torch.full((2, 4), float(step + microbatch))
            engine.backward(engine(batch).square().mean())
            engine.step()
    assert engine.global_samples == 30
    return engine.weight_hash()


# ---- the ledger ----


@contextmanager
def round_number(number: int) -> Iterator[None]:
    os.environ["ZERO_ROUND"] = str(number)
    try:
        yield
    finally:
        del os.environ["ZERO_ROUND"]


def test_over_deaths_and_resizes_every_sample_is_committed_exactly_once(
    worlds: WorldPool, tmp_path: Path
) -> None:
    """Three rounds of 2, 4 and 3 ranks; each but the first repeats steps that were lost."""
    root, ledger = str(tmp_path / "checkpoints"), str(tmp_path / "ledger")
    for number, (world, save_at, steps) in enumerate([(2, 2, 4), (4, 5, 6), (3, 8, 9)]):
        worlds.run(world, one_round, number, root, ledger, save_at, steps)
    report = verify(read_ledger(ledger), DATASET_SIZE)
    assert report.problems == ()
    # Round 1 went back from step 4 to 2, round 2 from 6 to 5.
    assert (report.steps, report.repeated_steps, report.samples) == (9, 3, 3 * DATASET_SIZE)
    assert list(report.world_by_step.values()) == [2, 2, 4, 4, 4, 3, 3, 3, 3]


def one_round(number: int, root: str, ledger: str, save_at: int, steps: int) -> None:
    with round_number(number):
        engine = make_engine(config(2, elastic={"sample_ledger": ledger}))
    engine.load_checkpoint(root)
    train(engine, save_at)
    engine.save_checkpoint(root)
    train(engine, steps)  # and die, with the steps after the save lost


def test_the_ledger_tells_what_was_consumed_not_what_was_planned(
    worlds: WorldPool, tmp_path: Path
) -> None:
    """A script that trains on one batch over and over is caught by it."""
    worlds.run(1, overfit_one_batch, str(tmp_path))
    assert not verify(read_ledger(tmp_path), DATASET_SIZE).exact


def overfit_one_batch(ledger: str) -> None:
    engine = make_engine(config(2, elastic={"sample_ledger": ledger}))
    batch = next(iter(engine.training_dataloader))
    while engine.global_steps < 1:
        engine.backward(engine(batch))
        engine.step()
