"""The loader follows the assignment, and what ranks note of micro-batches is sorted by it."""

from __future__ import annotations

import pytest
import torch

from zero_contract.errors import ZeroError
from zero_data.elastic_loader import sampler_of
from zero_data.global_batch import Assignment, BatchShape, Cursor, StepPlan, contiguous, node_turns
from zero_data.token_weights import correction, in_order

BATCH = BatchShape(microbatches=6, micro_batch=2)
SIZE = 19
"""A short second step: four micro-batches, of which the last has one sample."""
ASSIGNMENTS = {"node": node_turns((2, 1), 4), "local": contiguous(3)}
EXPECTED = {
    "node": ([0, 1, 4, 2, 3, 5], [0, 1, 3, 2, 3, 3]),
    "local": ([0, 2, 4, 1, 3, 5], [0, 2, 3, 1, 3, 3]),
}
"""Micro-batches by micro-step and rank; the last one again where it is padding."""


def wanted(where: str) -> list[tuple[int, ...]]:
    full, rest = EXPECTED[where]
    steps = [(0, full, 12), (12, rest, SIZE)]
    return [
        tuple(range(at + 2 * number, min(at + 2 * number + 2, end)))
        for at, numbers, end in steps
        for number in numbers
    ]


@pytest.mark.parametrize("where", ASSIGNMENTS)
def test_the_loader_hands_out_what_the_assignment_says(where: str) -> None:
    by_rank = []
    for rank in range(3):
        sampler = sampler_of(
            range(SIZE),  # type: ignore[arg-type]
            batch=BATCH,
            cursor=Cursor(),
            rank=rank,
            world=3,
            seed=1,
            shuffle=False,
            drop_last=False,
            assignment=ASSIGNMENTS[where],
        )
        by_rank.append([ticket.ids for ticket in sampler])
    assert [ids for micro in zip(*by_rank, strict=True) for ids in micro] == wanted(where)


@pytest.mark.parametrize("where", ASSIGNMENTS)
def test_notes_are_sorted_by_the_assignment_and_padding_counts_nothing(where: str) -> None:
    plan = StepPlan(0, 7, 2)
    numbers = EXPECTED[where][1]
    rows = ASSIGNMENTS[where].rows(plan.microbatches)
    live = [number is not None for row in rows for number in row]
    counts = torch.tensor(
        [100.0 + n if is_live else 5e5 for n, is_live in zip(numbers, live, strict=True)]
    )
    by_rank = counts.view(2, 3).t()
    assert in_order(by_rank, plan, ASSIGNMENTS[where]).tolist() == [100, 101, 102, 103]
    assert correction(by_rank, plan, ASSIGNMENTS[where]) == 7 * 256 / 406
    with pytest.raises(ZeroError, match="1 of 4 micro-batches of this step have no token count"):
        correction(torch.where(by_rank == 103, -1.0, by_rank), plan, ASSIGNMENTS[where])


def test_an_assignment_knows_where_each_micro_batch_is_run() -> None:
    assignment: Assignment = node_turns((2, 1), 4)
    assert assignment.places(6) == [0, 1, 3, 4, 2, 5]
