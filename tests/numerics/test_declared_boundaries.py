"""`set_gradient_accumulation_boundary` over a loader of the script's own: the script decides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from tests.support.models import Tokens
from tests.support.training import config, fingerprint, make_engine
from tests.support.world import WorldPool, one_result
from zero_deepspeed.utils import RepeatingLoader
from zero_engine.core.engine import Engine

STAGES = (0, 1, 2, 3)
SIZE, MICRO = 16, 2


def make(stage: int = 2, microbatches: int = 4) -> Engine:
    return make_engine(config(stage, train_batch_size=MICRO * microbatches), training_data=None)


def own_batches(engine: Engine) -> Iterator[Tensor]:
    """This rank's micro-batches of one pass, as torch divides them."""
    data = Tokens(SIZE)
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, engine.world_size, engine.global_rank, shuffle=False
    )
    return iter(DataLoader(data, batch_size=MICRO, sampler=sampler))


def train_as_accelerate_does(stage: int, accumulation: int) -> tuple[Any, ...]:
    """`step()` only where a step ends: every so many micro-batches, and at the end of the data."""
    engine = make(stage)
    for _ in range(2):
        batches = list(own_batches(engine))
        for number, batch in enumerate(batches, 1):
            last = number % accumulation == 0 or number == len(batches)
            engine.set_gradient_accumulation_boundary(last)
            assert engine.is_gradient_accumulation_boundary() == last
            engine.backward(engine(batch))
            if last:
                engine.step()
    return engine.global_steps, engine.micro_steps, *fingerprint(engine)


def train_as_deepspeeds_scripts_do(stage: int, accumulation: int) -> tuple[Any, ...]:
    """`step()` after every micro-batch: what has been said decides what it does."""
    engine = make(stage)
    for _ in range(2):
        batches = list(own_batches(engine))
        for number, batch in enumerate(batches, 1):
            last = number % accumulation == 0 or number == len(batches)
            engine.set_gradient_accumulation_boundary(last)
            engine.backward(engine(batch))
            engine.step()
    return engine.global_steps, engine.micro_steps, *fingerprint(engine)


@pytest.mark.full
def test_steps_end_where_the_script_says_with_the_same_bits_at_every_stage(
    worlds: WorldPool,
) -> None:
    # Four micro-batches a pass on each of two ranks: steps of three and of one.
    ways = (train_as_accelerate_does, train_as_deepspeeds_scripts_do)
    found = {result for how in ways for stage in STAGES for result in worlds.run(2, how, stage, 3)}
    [(steps, micro_steps, *_)] = found
    assert (steps, micro_steps) == (4, 8)


def test_steps_of_the_configs_size_are_the_engines_own(worlds: WorldPool) -> None:
    declared = one_result(worlds, train_in_declared_steps, sizes=(2,))
    assert one_result(worlds, train_in_steps_of_the_batch, sizes=(2,)) == declared


def train_in_declared_steps() -> tuple[Any, ...]:
    return train_as_accelerate_does(2, 2)[2:]


def train_in_steps_of_the_batch() -> tuple[Any, ...]:
    engine = make()
    for _ in range(2):
        for batch in own_batches(engine):
            engine.backward(engine(batch))
            engine.step()
    return fingerprint(engine)


def test_it_may_be_said_after_the_backward_too(worlds: WorldPool) -> None:
    [steps] = worlds.run(1, declare_after_backward)
    assert steps == [0, 0, 1, 1, 1, 2]


def declare_after_backward() -> list[int]:
    engine, steps = make(microbatches=8), []
    loader = RepeatingLoader(list(own_batches(engine)))
    for last in (False, False, True) * 2:
        engine.backward(engine(next(loader)))
        engine.set_gradient_accumulation_boundary(last)
        engine.step()
        steps.append(engine.global_steps)
    return steps


def test_a_run_of_declared_steps_is_resumed(worlds: WorldPool, tmp_path: Path) -> None:
    whole = one_result(worlds, train_through, None, sizes=(2,))
    assert one_result(worlds, train_through, str(tmp_path), sizes=(2,)) == whole


def train_through(root: str | None) -> tuple[Any, ...]:
    engine = make()
    for turn in range(2):
        if root is not None and turn:
            engine.save_checkpoint(root)
            engine.destroy()
            engine = make(stage=3)
            engine.load_checkpoint(root)
        for batch in own_batches(engine):
            engine.set_gradient_accumulation_boundary(True)
            engine.backward(engine(batch))
            engine.step()
    return fingerprint(engine)
