"""Which rank norms which elements: every block once, whole, whatever divides the tensors."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zero_step.gradients.division import Division, Positions, chunks, plan_norm, shares
from zero_step.gradients.norm import BLOCK, SHARD_GRAIN, block_norms

SIZES = st.integers(0, 5) | st.sampled_from([63, 64, 65, 128, 700])


@st.composite
def divisions(draw: st.DrawFn) -> tuple[int, list[Division]]:
    """Of some tensors over the same ranks: any dimension in chunks, shares, and any bounds."""
    world, found = draw(st.integers(1, 6)), []
    for _ in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(SIZES, min_size=1, max_size=3))
        while math.prod(shape) > 10_000:
            shape.pop()
        numel = math.prod(shape)
        cuts = sorted(draw(st.integers(0, numel)) for _ in range(world - 1))
        found.append(
            draw(
                st.sampled_from(
                    [
                        *(chunks(shape, dim, world) for dim in range(len(shape))),
                        chunks(shape, 0, world, reals=2),
                        shares(numel, world),
                        Division(numel, max(1, numel), (0, *cuts, numel)),
                    ]
                )
            )
        )
    return world, found


def _elements(division: Division, shard: int) -> Tensor:
    return division.elements_of(shard, torch.arange(division.length(shard)))


def taken(held: list[Tensor], positions: Positions) -> Tensor:
    return torch.cat([torch.empty(0).long(), *(held[number][at] for number, at in positions)])


@given(divisions(), st.randoms(use_true_random=False))
def test_every_block_is_normed_once_with_all_of_its_elements(
    drawn: tuple[int, list[Division]], choice: random.Random
) -> None:
    world, divided = drawn
    owners = choice.sample(range(world), world)  # any rank may have any shard
    plans = [plan_norm(divided, owners, rank) for rank in range(world)]
    # In the place of values, each shard holds the numbers of its elements.
    held = [
        [
            d.elements_of(owners.index(rank), torch.arange(d.length(owners.index(rank))))
            for d in divided
        ]
        for rank in range(world)
    ]
    normed: list[tuple[int, int]] = []
    for rank, plan in enumerate(plans):
        for number, (whole, elements) in enumerate(zip(plan.whole, held[rank], strict=True)):
            rows = elements[whole].view(-1, BLOCK)
            assert torch.equal(rows, rows[:, :1] + torch.arange(BLOCK))
            normed += [(number, int(row)) for row in rows[:, 0]]
        blocks = torch.full((plan.assembled * BLOCK,), -1)
        for source, places in plan.places.items():
            positions = plan.kept if source == rank else plans[source].given[rank]
            blocks[torch.cat(places)] = taken(held[source], positions)
        begins = [(number, each) for number, some in plan.begins for each in some.tolist()]
        for (number, begin), block in zip(begins, blocks.view(-1, BLOCK), strict=True):
            expected = begin + torch.arange(BLOCK)
            assert torch.equal(block, torch.where(expected < divided[number].numel, expected, -1))
        normed += begins
    every = [(number, at) for number, d in enumerate(divided) for at in range(0, d.numel, BLOCK)]
    assert sorted(normed) == every
    flat = [each.stride == max(1, each.numel) for each in divided]
    for plan in plans:
        assert not plan.given or any(division.cuts for division in divided)
        sent = Counter(dict.fromkeys(range(len(divided)), 0))
        for number, positions in itertools.chain(*plan.given.values()):
            sent[number] += positions.numel()
        # Only at its begin; or its few elements are all in the middle of a block.
        assert all(count < BLOCK for number, count in sent.items() if flat[number])


def test_a_dimension_is_divided_as_torch_chunk_divides_it() -> None:
    for size in range(1, 12):
        for world in range(1, 7):
            for dim, shape in ((0, (size, 3)), (1, (3, size))):
                division = chunks(shape, dim, world)
                parts = torch.arange(3 * size).view(shape).chunk(world, dim)
                for shard in range(world):
                    positions = torch.arange(division.length(shard))
                    expected = parts[shard].flatten() if shard < len(parts) else positions[:0]
                    assert torch.equal(division.elements_of(shard, positions), expected)


class Normed(TorchFunctionMode):
    """Records how many rows each call of vector_norm gets."""

    rows: ClassVar[list[int]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.linalg.vector_norm:
            self.rows.append(args[0].shape[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("numel", [1, BLOCK, 5 * BLOCK, SHARD_GRAIN, SHARD_GRAIN + 67])
def test_norms_of_blocks_are_never_taken_of_fewer_rows_than_a_gpu_needs_for_equal_bits(
    numel: int,
) -> None:
    values = torch.linspace(-3, 5, numel)
    Normed.rows.clear()
    with Normed():
        found = block_norms(values)
        block_norms(values[:1])
    assert min(Normed.rows) >= 16
    filled = torch.nn.functional.pad(values, (0, -numel % BLOCK)).view(-1, BLOCK)
    assert torch.equal(found, torch.linalg.vector_norm(filled, dim=1))
    whole = shares(numel, 1).whole_blocks(0)
    assert whole.stop == 0 or whole.stop - whole.start >= 16 * BLOCK
