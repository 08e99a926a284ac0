"""The ordered reduction on plain tensors: the same bits at every world size."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.plain import summed, to_int8
from tests.support.world import WorldPool
from zero_comm.exchange.collectives import Collectives, wait
from zero_comm.sums.additions import ROUNDED
from zero_comm.sums.buffer_pool import BufferPool
from zero_comm.sums.node import HeldPieces
from zero_comm.sums.ordered_sum import OrderedSum, Progress, form_pieces, next_sums
from zero_comm.sums.plan import Expression, Piece, Where, plan_reduction
from zero_comm.sums.reduction import OrderedReduction, Turn
from zero_comm.sums.spill import Spill
from zero_data.global_batch import contiguous, node_turns

CPU = torch.device("cpu")
MICROBATCHES = 13
N = 6 * 1024
"""Divides among one, two and three ranks."""


def gradient(microbatch: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(microbatch)
    return (torch.randn(N, generator=generator) * 10.0 ** (microbatch % 5)).to(dtype)


def reduced(dtype: torch.dtype, block: int) -> Tensor:
    """What the ranks of this group come to, put together; each runs every `world`-th micro-batch,
    and past the last of them a padding micro-batch of NaN."""
    collectives, pool = Collectives(), BufferPool(CPU)
    reduction, world = OrderedReduction(collectives, pool), collectives.world
    whole = torch.empty(N)
    sums = OrderedSum(collectives.own(whole), block)
    for begin in range(0, MICROBATCHES, world):
        number = begin + collectives.rank
        own = gradient(number, dtype) if number < MICROBATCHES else torch.full((N,), torch.nan)
        turn = Turn(live=min(world, MICROBATCHES - begin), first=begin == 0)
        reduction.start(own.to(dtype), f"micro-step {begin}", sums, turn).finish()
    sums.settle()
    return collectives.everybodys(sums.total, "sums").flatten()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [1, 4, 8])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.corners(world=[1, 3], block=[1, 8])
def test_a_sum_is_that_of_the_expression_at_every_world_size(
    worlds: WorldPool, world: int, block: int, dtype: torch.dtype
) -> None:
    gradients = [gradient(i, dtype) for i in range(MICROBATCHES)]
    expected = summed(gradients, block)
    assert not torch.equal(expected, summed(gradients, 2))
    for rank in worlds.run(world, reduced, dtype, block):
        assert torch.equal(rank, expected)


def begun_in_two_orders() -> dict[str, list[float]]:
    """What a rank receives of two sums, which the ranks begin in different orders."""
    collectives = Collectives()  # it has not met: ranks do not read each other's memory
    names = ["a", "b"] if collectives.rank % 2 else ["b", "a"]
    sent = {name: torch.full((4,), float(ord(name) + collectives.rank)) for name in names}
    received = {name: torch.empty(4 // collectives.world) for name in names}
    under_way = [
        collectives.exchange_gradients(sent[name], received[name], f"gradients of {name}")
        for name in names
    ]
    for pending in under_way:
        wait(pending)
    return {name: into.tolist() for name, into in received.items()}


def test_gradients_that_ranks_send_in_different_orders_are_not_mixed_up(worlds: WorldPool) -> None:
    a, b = float(ord("a")), float(ord("b"))
    assert worlds.run(2, begun_in_two_orders) == [
        {"a": [a + 1] * 2, "b": [b + 1] * 2},
        {"a": [a] * 2, "b": [b] * 2},
    ]


def test_a_sum_has_the_same_bits_however_many_micro_batches_come_at_once() -> None:
    """In every dtype; with blocks that are rounded, or not; told of the last ones or not; what is
    pending stays within its bound, and within its budget."""
    draw, pool = random.Random(0), BufferPool(CPU)
    for dtype, rounds in itertools.product(
        (torch.float32, torch.bfloat16, torch.float16), (False, True)
    ):
        becomes = to_int8 if rounds else None
        for _ in range(40):
            count, block = draw.randint(1, 40), draw.choice([1, 2, 4, 8, 16])
            gradients = [gradient(i, dtype)[:256] for i in range(count)]
            given = [*map(torch.clone, gradients)]
            spill, budget = spilling(draw)
            total = torch.full((256,), torch.nan)
            sums, at = OrderedSum(total, block, spill, rounds=rounds), 0
            while at < count:
                some, begin = given[at : at + draw.randint(1, 9)], at
                at += len(some)
                last = at == count and draw.random() < 0.5
                sums.add(some, pool, first=begin == 0, last=last)
                assert len(list(sums.kept())) <= math.log2(block)
                assert spill.here_bytes <= budget
                assert torch.equal(sums.value(), summed(gradients[:at], block, becomes))
            sums.settle()
            assert not list(sums.kept())
            assert not spill.here_bytes
            assert torch.equal(sums.total, summed(gradients, block, becomes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_has_the_same_bits_where_senders_have_added_what_they_may(dtype: torch.dtype) -> None:
    """Senders of any consecutive micro-batches; single gradients keep their dtype."""
    draw, pool = random.Random(1), BufferPool(CPU)
    for _ in range(60):
        count, block = draw.randint(1, 40), draw.choice([1, 2, 4, 8, 16])
        gradients = [gradient(i, dtype)[:256] for i in range(count)]
        sums, at = OrderedSum(torch.full((256,), torch.nan), block), 0
        while at < count:
            some = [each.clone() for each in gradients[at : at + draw.randint(1, 9)]]
            formed = form_pieces(some, at, block, pool)
            assert tuple(piece for piece, _ in formed) == Expression(
                micro_batches=1 << 30, block=block
            ).pieces(range(at, at + len(some)))
            assert {each.dtype for piece, each in formed if piece.level} <= {torch.float32}
            assert {each.dtype for piece, each in formed if not piece.level} <= {dtype}
            levels = [piece.level for piece, _ in formed]
            sums.add([each for _, each in formed], pool, first=at == 0, levels=levels)
            at += len(some)
            assert sums.count == at
        sums.settle()
        assert torch.equal(sums.total, summed(gradients, block))


def test_pieces_that_come_early_are_kept_as_the_plan_says_and_change_no_bit() -> None:
    """Nodes that take blocks in turn, and aligned parts of blocks where ranks divide none; blocks
    are rounded by the node that has all of one, or by the owner."""
    draw, pool = random.Random(2), BufferPool(CPU)
    for nodes, block in itertools.product(((2, 2), (1, 1, 1), (4, 2), (3, 1), (1, 2, 5)), (4, 8)):
        for number, count in enumerate(draw.sample(range(1, 64), 8)):
            becomes = to_int8 if number % 2 else None
            rows = node_turns(nodes, block).rows(count)
            plan = plan_reduction(rows, block=block, nodes=nodes, where=Where.NODE)
            gradients = [gradient(i)[:256] for i in range(count)]
            spill, budget = spilling(draw)
            total = torch.full((256,), torch.nan)
            sums = OrderedSum(total, block, spill, rounds=becomes is not None)
            for step in plan.micro_steps:
                given = [
                    (piece, form(gradients, piece, block, becomes))
                    for node in step.nodes
                    for piece in node.gives
                ]
                first, last = step is plan.micro_steps[0], step is plan.micro_steps[-1]
                sums.add_pieces(given, pool, first=first, last=last)
                beside = sum(piece.start > 0 for piece in step.owner.keeps)
                assert len(list(sums.kept())) <= beside
                assert spill.here_bytes <= budget
            sums.settle()
            assert torch.equal(sums.total, summed(gradients, block, becomes))


@pytest.mark.parametrize(("given_rounded", "times"), [(True, 2), (False, 3)])
def test_a_block_that_its_node_has_rounded_is_not_rounded_again(
    given_rounded: bool, times: int
) -> None:
    """A whole block, one in two pieces, and what there is of the last one."""
    levels = (2, 1, 1, 0)
    additions, _ = next_sums(
        Progress(), levels, 4, last=True, rounds=True, given_rounded=given_rounded
    )
    assert sum(addition.right == ROUNDED for addition in additions) == times


def test_a_block_that_an_owner_completes_before_its_turn_is_rounded() -> None:
    """The halves of the second block come before the first block, which a node has rounded."""
    gradients, pool = [gradient(number)[:256] for number in range(8)], BufferPool(CPU)
    sums = OrderedSum(torch.empty(256), 4, rounds=True)
    for pieces in ([Piece(6, 1)], [Piece(4, 1)], [Piece(0, 2)]):
        given = [(piece, form(gradients, piece, 4, to_int8)) for piece in pieces]
        first, last = pieces[0].start == 6, pieces[0].start == 0
        sums.add_pieces(given, pool, first=first, last=last)
    sums.settle()
    assert torch.equal(sums.total, summed(gradients, 4, to_int8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", [Where.NODE, Where.LOCAL])
def test_senders_hold_and_pass_on_what_the_plan_says_with_the_same_bits(
    where: Where, dtype: torch.dtype
) -> None:
    """Ranks, nodes and owners of random plans; what is given is used up, what is held is not: it is
    on the device up to a budget, or in host memory."""
    draw, pool = random.Random(3), BufferPool(CPU)
    for nodes, block in itertools.product(((2, 2), (3, 1), (1, 2, 2)), (1, 4, 8)):
        for count in draw.sample(range(1, 40), 5):
            world = sum(nodes)
            turns = contiguous(world) if where is Where.LOCAL else node_turns(nodes, block)
            rows = turns.rows(count)
            plan = plan_reduction(rows, block=block, nodes=nodes, where=where)
            gradients = [gradient(i, dtype)[:64] for i in range(count)]
            spill, budget = spilling(draw)
            ranks, of_nodes = (
                [HeldPieces(spill) for _ in range(size)] for size in (world, len(nodes))
            )
            sums = OrderedSum(torch.full((64,), torch.nan), block, spill)
            for row, step in zip(rows, plan.micro_steps, strict=True):
                passed = []
                for held, formed, number in zip(ranks, step.ranks, row, strict=True):
                    own = [] if number is None else [gradients[number].clone()]
                    passed.append(held.add(own, formed, pool))
                    assert len(list(held)) == len(formed.keeps)
                    assert spill.here_bytes <= budget
                    for used in own:
                        if all(each is not used for _, each in passed[-1]):
                            used.fill_(torch.nan)
                arrived = []
                for node, (held, formed) in enumerate(zip(of_nodes, step.nodes, strict=True)):
                    inside = [p for r in plan.slices.topology.ranks(node) for p in passed[r]]
                    taken = [each for _, each in sorted(inside, key=lambda pair: pair[0])]
                    arrived += held.add(taken, formed, pool)
                    assert len(list(held)) == len(formed.keeps)
                    assert spill.here_bytes <= budget
                assert all(
                    each.dtype == (dtype if plan.expression.is_single(piece) else torch.float32)
                    for piece, each in arrived
                )
                first, last = step is plan.micro_steps[0], step is plan.micro_steps[-1]
                sums.add_pieces(arrived, pool, first=first, last=last)
            sums.settle()
            assert torch.equal(sums.total, summed(gradients, block))


def spilling(draw: random.Random) -> tuple[Spill, float]:
    """A place for what is kept, and how many bytes of it stay on the device."""
    budget = draw.choice([None, 0, 256, 1024, 2048])
    return Spill(CPU, budget), math.inf if budget is None else budget


def form(
    gradients: list[Tensor],
    piece: Piece,
    block: int,
    becomes: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """What a node sends of a piece; it rounds whole blocks."""
    part = gradients[piece.start : piece.start + 2**piece.level]
    if 1 << piece.level == block:
        return summed(part, block, becomes).clone()
    return summed(part, block).clone() if len(part) > 1 else part[0].clone()


def test_what_is_added_after_a_gradient_was_replaced_is_added_to_it() -> None:
    """In the middle of a block: the first five are settled, and no sibling is left of the sixth."""
    gradients, pool = [gradient(number) for number in range(9)], BufferPool(CPU)
    sums = OrderedSum(torch.empty(N), 8)
    sums.add([each.clone() for each in gradients[:5]], pool, first=True)
    sums.settle()
    sums.total.fill_(3)
    sums.add([each.clone() for each in gradients[5:]], pool, first=False)
    sums.settle()
    block = gradients[5] + (gradients[6] + gradients[7])
    assert torch.equal(sums.total, (3 + block) + gradients[8])


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("count", [3, 7])
@pytest.mark.parametrize("block", [1, 2, 4, 8])
def test_a_total_may_be_the_memory_of_one_of_the_first_micro_batches(
    block: int, count: int, rounds: bool
) -> None:
    """Piece of memory after piece of memory: more elements than are added at once."""
    for place in {0, 1, count - 1}:
        gradients = [gradient(number).repeat(43) for number in range(count)]
        given = [each.clone() for each in gradients]
        sums = OrderedSum(given[place], block, rounds=rounds)
        sums.add(given, BufferPool(CPU), first=True)
        sums.settle()
        assert torch.equal(sums.total, summed(gradients, block, to_int8 if rounds else None))
