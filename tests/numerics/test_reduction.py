"""The ordered reduction on plain tensors: the same bits at every world size."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.support.world import WorldPool
from zero_comm.collectives import Collectives
from zero_comm.reduction import (
    NORM_BLOCK,
    BlockNorm,
    BufferPool,
    OrderedReduction,
    fold,
    total_norm,
)

CPU = torch.device("cpu")
MICROBATCHES = 4
N = 6 * NORM_BLOCK
"""Divides among one, two and three ranks."""


def gradient(microbatch: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(microbatch)
    return (torch.randn(N, generator=generator) * 100.0**microbatch).to(dtype)


def one_after_the_other(dtype: torch.dtype) -> Tensor:
    total = gradient(0, dtype).float()
    for microbatch in range(1, MICROBATCHES):
        total = total + gradient(microbatch, dtype).float()
    return total


def reduced(dtype: torch.dtype) -> Tensor:
    """What the ranks of this group come to, put together; each runs every `world`-th micro-batch,
    and past the last of them a padding micro-batch of NaN."""
    collectives, pool = Collectives(), BufferPool(CPU)
    reduction, world = OrderedReduction(collectives, pool), collectives.world
    whole = torch.empty(N)
    for begin in range(0, MICROBATCHES, world):
        number = begin + collectives.rank
        own = gradient(number, dtype) if number < MICROBATCHES else torch.full((N,), torch.nan)
        under_way = reduction.start(own.to(dtype), f"gradients of micro-step {begin}")
        live = min(world, MICROBATCHES - begin)
        reduction.finish(under_way, collectives.own(whole), live=live, first=begin == 0)
    return collectives.everybodys(collectives.own(whole), "sums").flatten()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_sum_is_that_of_the_micro_batches_one_after_the_other(
    worlds: WorldPool, world: int, dtype: torch.dtype
) -> None:
    expected = one_after_the_other(dtype)
    assert not torch.equal(
        expected, sum(gradient(i, dtype).float() for i in reversed(range(MICROBATCHES)))
    )
    for rank in worlds.run(world, reduced, dtype):
        assert torch.equal(rank, expected)


def test_a_total_may_be_the_memory_of_one_of_the_micro_batches() -> None:
    for place in range(3):
        microbatches = [gradient(number) for number in range(3)]
        expected = microbatches[0] + microbatches[1] + microbatches[2]
        fold(microbatches, microbatches[place], BufferPool(CPU), first=True)
        assert torch.equal(microbatches[place], expected)


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_a_norm_sees_block_after_block_and_nothing_of_the_padding(world: int) -> None:
    lengths = [1, 7 * NORM_BLOCK + 1, 4 * NORM_BLOCK]
    padded = [-(-n // (world * NORM_BLOCK)) * world * NORM_BLOCK for n in lengths]
    tensors = [torch.zeros(n) for n in padded]
    for tensor, length in zip(tensors, lengths, strict=True):
        tensor[:length] = torch.randn(length, generator=torch.Generator().manual_seed(length))
    norm = BlockNorm(lengths, [n // world for n in padded], world, CPU)
    table = torch.stack(
        [norm.of_own([tensor.chunk(world)[rank] for tensor in tensors]) for rank in range(world)]
    )
    ordered = norm.in_order(table)
    blocks = [t[: -(-n // NORM_BLOCK) * NORM_BLOCK] for t, n in zip(tensors, lengths, strict=True)]
    expected = torch.cat([torch.linalg.vector_norm(b.view(-1, NORM_BLOCK), dim=1) for b in blocks])
    assert torch.equal(ordered, expected)
    assert total_norm(ordered) == math.sqrt(float(expected.double().square().sum()))


def test_the_first_block_that_is_not_finite_is_found_in_its_tensor() -> None:
    norm = BlockNorm([1, 3 * NORM_BLOCK], [NORM_BLOCK, 3 * NORM_BLOCK], 1, CPU)
    starts = [(0, 0), (1, 0), (1, NORM_BLOCK), (1, 2 * NORM_BLOCK)]
    for block, start in enumerate(starts):
        norms = torch.ones(4)
        norms[block:] = torch.inf
        assert norm.first_not_finite(norms) == start
