"""Scripts that accumulate by themselves with `no_sync`, and what a micro-step says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.numerics.test_data import Stream
from tests.support.models import Tokens
from tests.support.saving import heard
from tests.support.training import config, fingerprint, make_engine
from tests.support.world import WorldError, WorldPool
from zero_engine.core.engine import Engine

MICRO, COUNT, SIZE = 2, 4, 32
"""Four micro-batches make a step: its loss is divided by a power of two, so bits stay."""


def make(stage: int, accumulation: int, data: Any = None) -> Engine:
    settings = config(stage, gradient_accumulation_steps=accumulation)
    del settings["train_batch_size"]
    return make_engine(settings, training_data=data)


def own_batches(engine: Engine) -> Iterator[Tensor]:
    """Micro-batches in the order in which the engine runs them."""
    data = Tokens(SIZE)
    for start in range(engine.global_rank * MICRO, SIZE, engine.world_size * MICRO):
        yield torch.stack([data[index] for index in range(start, start + MICRO)])


def accumulate_by_itself(stage: int, loads: bool) -> tuple[Any, ...]:
    """As for DDP: the loss is divided, and only the last backward of a step is outside."""
    engine = make(stage, 1, Tokens(SIZE) if loads else None)
    applied = []
    for number, batch in enumerate(engine.training_dataloader or own_batches(engine), 1):
        if number % COUNT:
            with engine.no_sync():
                engine.backward(engine(batch) / COUNT)
        else:
            engine.backward(engine(batch) / COUNT)
            engine.step()
        applied.append(engine.was_step_applied())
    return applied, fingerprint(engine)


def accumulate_as_the_config_says(stage: int, loads: bool) -> tuple[Any, ...]:
    engine = make(stage, COUNT, Tokens(SIZE) if loads else None)
    applied = []
    for batch in engine.training_dataloader or own_batches(engine):
        engine.backward(engine(batch))
        engine.step()
        applied.append(engine.was_step_applied())
    return applied, fingerprint(engine)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("loads", [False, True], ids=["own loader", "engine's loader"])
def test_no_sync_around_all_but_the_last_backward_accumulates_as_in_deepspeed(
    worlds: WorldPool, stage: int, loads: bool
) -> None:
    ours = worlds.run(2, accumulate_as_the_config_says, stage, loads)
    assert ours[0][0] == [False, False, False, True] * (SIZE // (2 * MICRO * COUNT))
    assert worlds.run(2, accumulate_by_itself, stage, loads) == ours


def test_a_step_that_depends_on_the_number_of_ranks_is_said_once(worlds: WorldPool) -> None:
    said, silent = worlds.run(2, lines_of_own_accumulation)
    assert [line.split(":")[0] for line in said] == [
        "no_sync() continues after the config's batch ends (micro-step 1)"
    ]
    assert silent == []


def lines_of_own_accumulation() -> list[str]:
    with heard() as lines:
        accumulate_by_itself(1, False)
    return [line for line in lines if "no_sync" in line]


def test_batches_of_a_stream_are_those_of_the_config_and_the_error_says_what_to_set(
    worlds: WorldPool,
) -> None:
    message = (
        r"no_sync\(\) around micro-step 1 of 1, which ends the step.*gradient_accumulation_ste"
    )
    with pytest.raises(WorldError, match=message):
        worlds.run(1, accumulate_over_a_stream)


def accumulate_over_a_stream() -> None:
    engine = make(1, 1, Stream())
    with engine.no_sync():
        engine.backward(engine(next(iter(engine.training_dataloader))))
