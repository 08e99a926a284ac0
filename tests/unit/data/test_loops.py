"""Loops over a loader whose position is moved meanwhile, as a load does, or another round."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_contract.errors import ZeroError
from zero_data.elastic_loader import ElasticLoader, sampler_of
from zero_data.global_batch import BatchShape, Cursor

SAMPLES, EPOCHS = 6, 4
STEPS = 3
"""Of an epoch, each with one micro-batch of 2."""


def loader_of(dataset: Any, cursor: Cursor) -> ElasticLoader:
    sampler = sampler_of(
        dataset,
        seed=1,
        shuffle=True,
        drop_last=False,
        batch=BatchShape(microbatches=1, micro_batch=2),
        cursor=cursor,
        rank=0,
        world=1,
        seeds_forward=False,
    )
    return ElasticLoader(sampler)


def loop(moves: dict[int, int]) -> tuple[list[int], int]:
    """The steps that a script takes which counts epochs, and where it ends.

    `moves`: the step to which it goes when this many have been taken.
    """
    cursor = Cursor()
    loader, taken = loader_of(range(SAMPLES), cursor), []
    for _ in range(loader.epoch, EPOCHS):
        for _ in loader:
            loader.run()
            taken.append(cursor.step)
            cursor.step, cursor.samples = cursor.step + 1, cursor.samples + 2
            if (step := moves.get(len(taken))) is not None:
                cursor.move(step=min(step, cursor.step), samples=2 * min(step, cursor.step))
    return taken, cursor.step


@given(st.dictionaries(st.integers(1, 20), st.integers(0, EPOCHS * STEPS - 1), max_size=4))
def test_a_loop_that_counts_epochs_ends_with_the_last_one_wherever_it_goes_back_to(
    moves: dict[int, int],
) -> None:
    taken, end = loop(moves)
    expected, step = [], 0
    while step < EPOCHS * STEPS:
        expected.append(step)
        step = min(step + 1, moves.get(len(expected), step + 1))
    assert (taken, end) == (expected, EPOCHS * STEPS)


@pytest.mark.parametrize("length", [SAMPLES - 1, SAMPLES + 1])
def test_a_dataset_of_another_length_than_at_the_begin_is_refused(length: int) -> None:
    samples = [*range(SAMPLES)]
    loader = loader_of(samples, Cursor())
    assert len(list(loader)) == STEPS
    samples[:] = range(length)
    with pytest.raises(ZeroError, match=f"has {length} samples, and had 6 when the run began"):
        list(loader)
