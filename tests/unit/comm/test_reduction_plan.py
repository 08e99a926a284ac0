"""The plan of a sum: whatever the places and modes, the expression that is written down below."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.traffic import traffic
from zero_comm.sums.plan import (
    Expression,
    Formed,
    Piece,
    Plan,
    Where,
    most_pending,
    plan_reduction,
)
from zero_comm.topology import rail_order
from zero_data.global_batch import Assignment, contiguous, node_turns, strided

Tree = Any
"""A micro-batch's number, or the pair of what is added."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """Pieces that one rank sends to another, for the elements [start, stop)."""

    source: int
    target: int
    pieces: tuple[Piece, ...]
    start: int
    """In `Plan.parts`-ths of the gradient."""
    stop: int


def messages_inside(plan: Plan, micro_step: int, rank: int) -> Iterator[Message]:
    """What a rank sends to the others of its node: to each its slice of what the rank has."""
    node, local = plan.slices.topology.place(rank)
    pieces = plan.micro_steps[micro_step].ranks[rank].gives
    first = rank - local
    for target in range(first, first + plan.nodes[node]):
        if pieces and target != rank:
            own = plan.slices.slice_of(target)
            yield Message(source=rank, target=target, pieces=pieces, start=own.start, stop=own.stop)


def messages_to_owners(plan: Plan, micro_step: int, rank: int) -> Iterator[Message]:
    """What a rank sends to owners: their parts of its slice of each piece of its node."""
    pieces = plan.micro_steps[micro_step].nodes[plan.slices.topology.place(rank)[0]].gives
    for target, start, stop in plan.slices.routes(rank):
        if pieces and target != rank:
            yield Message(source=rank, target=target, pieces=pieces, start=start, stop=stop)


def unrounded(of_block: Tree) -> Tree:
    """What becomes of the sum of a block in a run that rounds nothing."""
    return of_block


def to_int8(of_block: Tree) -> Tree:
    """The same in a run that rounds blocks."""
    return ("Q", of_block)


def written_down(
    micro_batches: int, block: int, rounded: Callable[[Tree], Tree] = unrounded
) -> Tree:
    """The definition, word for word."""

    def t(a: int, k: int) -> Tree:
        if a >= micro_batches:
            return None
        if k == 0:
            return a
        left, right = t(a, k - 1), t(a + 2 ** (k - 1), k - 1)
        return left if right is None else (left, right)

    total = rounded(t(0, int(math.log2(block))))
    for start in range(block, micro_batches, block):
        total = (total, rounded(t(start, int(math.log2(block)))))
    return total


class Place:
    """Whatever forms pieces; it knows nothing of the numbers of micro-batches but their names."""

    def __init__(self) -> None:
        self.held: dict[Piece, Tree] = {}

    def run(self, formed: Formed, values: dict[Piece, Tree], expression: Expression) -> None:
        assert set(values) == set(formed.takes)
        for piece in formed.takes:
            self.held[expression.named(piece.start, piece.level)] = values[piece]
        for left, right in ((merge.left, merge.right) for merge in formed.merges):
            assert left.level == right.level
            assert right.start == left.start + 2**left.level
            assert left.start % 2 ** (left.level + 1) == 0
            sum_ = expression.named(left.start, left.level + 1)
            self.held[sum_] = (self.held.pop(left), self.held.pop(right))

    def give(self, formed: Formed, expression: Expression) -> dict[Piece, Tree]:
        names = {piece: expression.named(piece.start, piece.level) for piece in formed.gives}
        given = {piece: self.held.pop(name) for piece, name in names.items()}
        assert set(self.held) == set(formed.keeps)
        return given


def executed(
    plan: Plan,
    rows: Sequence[Sequence[int | None]],
    rounded: Callable[[Tree], Tree] = unrounded,
) -> list[Tree]:
    """The sum that each rank owns, after messages that all arrive; who ends a block rounds it."""
    world, expression = plan.world, plan.expression
    ranks, slices, shards = ([Place() for _ in range(world)] for _ in range(3))
    sums: list[Tree] = [None] * world
    whole: list[set[Piece]] = [set() for _ in range(world)]  # blocks that have come as one piece
    for number, (step, row) in enumerate(zip(plan.micro_steps, rows, strict=True)):
        given = []
        for place, formed, micro_batch in zip(ranks, step.ranks, row, strict=True):
            own = {} if micro_batch is None else {Piece(micro_batch, 0): micro_batch}
            place.run(formed, own, expression)
            given.append(place.give(formed, expression))
        arrived = delivered(
            given,
            [list(messages_inside(plan, number, r)) for r in range(world)],
            plan,
            plan.slices.slice_of,
        )
        given = []
        for rank in range(world):
            formed = step.nodes[plan.slices.topology.place(rank)[0]]
            slices[rank].run(formed, arrived[rank], expression)
            given.append(slices[rank].give(formed, expression))
            for piece in filter(expression.is_block, given[rank]):
                given[rank][piece] = rounded(given[rank][piece])
        arrived = delivered(
            given,
            [list(messages_to_owners(plan, number, r)) for r in range(world)],
            plan,
            plan.slices.shard_of,
        )
        for rank in range(world):
            shards[rank].run(step.owner, arrived[rank], expression)
            whole[rank] |= set(filter(expression.is_block, arrived[rank]))
            blocks = shards[rank].give(step.owner, expression)
            for piece in step.owner.gives:
                of_block = blocks[piece] if piece in whole[rank] else rounded(blocks[piece])
                sums[rank] = of_block if sums[rank] is None else (sums[rank], of_block)
    assert not any(place.held for place in itertools.chain(ranks, slices, shards))
    return sums


def delivered(
    given: list[dict[Piece, Tree]], messages: list[list[Message]], plan: Plan, wanted: Any
) -> list[dict[Piece, Tree]]:
    """What has come to each rank, once all parts of it that the rank wants are there."""
    inside = wanted == plan.slices.slice_of
    parts: list[dict[Piece, dict[int, tuple[int, Tree]]]] = [{} for _ in given]
    for source, (values, sent) in enumerate(zip(given, messages, strict=True)):
        routes = [(m.target, m.start, m.stop, m.pieces) for m in sent]
        own = wanted(source)
        kept = [own] if inside else [_meet(own, plan.slices.slice_of(source))]
        routes += [(source, part.start, part.stop, tuple(values)) for part in kept if part]
        for target, start, stop, pieces in routes:
            for piece in pieces:
                assert start not in parts[target].setdefault(piece, {})
                parts[target][piece][start] = (stop, values[piece])
    return [
        {piece: _joined(found, wanted(rank)) for piece, found in pieces.items()}
        for rank, pieces in enumerate(parts)
    ]


def _meet(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _joined(found: dict[int, tuple[int, Tree]], wanted: range) -> Tree:
    at = wanted.start
    for start, (stop, _) in sorted(found.items()):
        assert start == at
        at = stop
    assert at == wanted.stop
    (first, *others) = [value for _, value in found.values()]
    assert all(other == first for other in others)
    return first


def assignment(where: Where, nodes: tuple[int, ...], block: int, count: int) -> Assignment:
    return {
        Where.OWNER: strided(sum(nodes)),
        Where.NODE: node_turns(nodes, block),
        Where.LOCAL: contiguous(sum(nodes)),
    }[where]


def check(count: int, block: int, nodes: tuple[int, ...], where: Where) -> Plan:
    rows = assignment(where, nodes, block, count).rows(count)
    plan = plan_reduction(rows, block=block, nodes=nodes, where=where)
    assert executed(plan, rows) == [written_down(count, block)] * sum(nodes)
    assert executed(plan, rows, to_int8) == [written_down(count, block, to_int8)] * sum(nodes)
    return plan


def layouts(world: int) -> Iterator[tuple[int, ...]]:
    """All ways to group ranks into nodes."""
    for cuts in itertools.product((False, True), repeat=world - 1):
        ends = [i + 1 for i, cut in enumerate(cuts) if cut] + [world]
        yield tuple(stop - start for start, stop in zip([0, *ends], ends, strict=False))


LAYOUTS = [nodes for world in range(1, 7) for nodes in layouts(world)]
BLOCKS = [1, 2, 4, 8, 16, 32]


def test_the_expression_is_what_it_says_it_is() -> None:
    assert written_down(5, 1) == ((((0, 1), 2), 3), 4)
    assert written_down(7, 8) == (((0, 1), (2, 3)), ((4, 5), 6))
    assert written_down(7, 2) == ((((0, 1), (2, 3)), (4, 5)), 6)
    assert written_down(5, 4, to_int8) == (("Q", ((0, 1), (2, 3))), ("Q", 4))


@pytest.mark.parametrize("where", Where)
def test_every_plan_comes_to_the_expression(where: Where) -> None:
    """A corner of the product below."""
    layouts = [(1,), (4,), (1, 1, 1), (2, 2), (1, 2), (3, 1, 2), (2, 4)]
    for nodes, block, count in itertools.product(layouts, [1, 4, 8, 32], [1, 3, 8, 13, 32]):
        check(count, block, nodes, where)


@pytest.mark.full
@pytest.mark.parametrize("where", Where)
@pytest.mark.parametrize("nodes", LAYOUTS, ids=str)
def test_every_plan_of_up_to_six_ranks_comes_to_the_expression(
    nodes: tuple[int, ...], where: Where
) -> None:
    for block, count in itertools.product(BLOCKS, range(1, 33)):
        check(count, block, nodes, where)


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(n, marks=pytest.mark.full) for n in range(6, 60))]
)
def test_any_assignment_to_up_to_64_ranks_comes_to_the_expression(seed: int) -> None:
    """Uneven counts, in any order, with padding micro-batches anywhere; owners in any order."""
    draw = random.Random(seed)
    nodes = [draw.randint(1, 8)]
    while sum(nodes) < 57 and draw.random() < 0.85:
        nodes.append(draw.randint(1, 8))
    world, block = sum(nodes), draw.choice(BLOCKS)
    count = draw.randint(1, 2 * world)
    steps = -(-count // world) + draw.randint(0, 2)
    places = draw.sample(range(steps * world), count)
    flat: list[int | None] = [None] * (steps * world)
    for number, place in enumerate(places):
        flat[place] = number
    rows = [flat[step * world : (step + 1) * world] for step in range(steps)]
    owners = draw.sample(range(world), world)
    for where in Where:
        plan = plan_reduction(rows, block=block, nodes=nodes, where=where, owners=owners)
        assert executed(plan, rows) == [written_down(count, block)] * world


# ---- memory ----


def peak(plan: Plan, tier: str) -> int:
    """The most pieces that one place of a tier keeps."""
    if tier == "owner":
        steps = range(len(plan.micro_steps))
        return max(
            sum(not plan.expression.is_block(piece) for piece in plan.micro_steps[i].owner.keeps)
            for i in steps
        )
    places = [formed for step in plan.micro_steps for formed in getattr(step, tier)]
    return max(len(formed.keeps) for formed in places)


def early(plan: Plan, micro_step: int) -> int:
    """The whole blocks that an owner keeps, because an earlier one is not there yet."""
    return sum(map(plan.expression.is_block, plan.micro_steps[micro_step].owner.keeps))


def test_what_owners_and_senders_keep_is_bounded_by_the_logarithm_of_the_block() -> None:
    """Strided: log2(B / W) at owners, none where B divides W; nothing elsewhere, and none early."""
    for nodes, block, count in itertools.product(LAYOUTS, BLOCKS, [7, 16, 31, 32]):
        rows = strided(sum(nodes)).rows(count)
        plan = plan_reduction(rows, block=block, nodes=nodes)
        assert peak(plan, "owner") <= int(math.log2(block // math.gcd(block, sum(nodes))))
        assert peak(plan, "nodes") == peak(plan, "ranks") == 0
        assert not any(early(plan, step) for step in range(len(rows)))


def test_the_most_that_an_owner_keeps_is_that_of_the_plan() -> None:
    for world, block, count in itertools.product(range(1, 10), BLOCKS, [1, 5, 16, 40, 70]):
        plan = plan_reduction(strided(world).rows(count), block=block, nodes=(1,) * world)
        last = len(plan.micro_steps) - 1
        kept = [sum(p.start > 0 for p in s.owner.keeps) for s in plan.micro_steps[:last]]
        assert most_pending(block, world, count) == max(kept, default=0)
    assert [most_pending(8, world, 1 << 20) for world in (1, 2, 4, 8)] == [3, 2, 1, 0]


@pytest.mark.parametrize("nodes", [(1,) * 4, (2, 2), (4, 4), (2, 2, 2), (1, 1, 1, 1, 1), (8, 8)])
@pytest.mark.parametrize("block", [8, 16, 32])
def test_a_node_keeps_the_logarithm_of_its_micro_steps_and_an_owner_a_block_of_each_other_node(
    nodes: tuple[int, ...], block: int
) -> None:
    count = 3 * len(nodes) * block
    plan = check(count, block, nodes, Where.NODE)
    assert peak(plan, "nodes") <= math.log2(block // nodes[0])
    assert max(early(plan, step) for step in range(len(plan.micro_steps))) <= len(nodes) - 1
    assert peak(plan, "owner") == 0


def test_a_rank_of_its_own_keeps_at_most_its_pieces() -> None:
    for nodes, block, count in itertools.product(LAYOUTS, BLOCKS, [7, 16, 31, 32]):
        rows = contiguous(sum(nodes)).rows(count)
        plan = plan_reduction(rows, block=block, nodes=nodes, where=Where.LOCAL)
        own = len(rows)
        whole = own // block
        assert peak(plan, "ranks") <= whole + 2 * math.log2(block)
        assert peak(plan, "owner") == peak(plan, "nodes") == 0


def test_the_bytes_kept_are_those_of_the_pieces() -> None:
    """Two nodes of two, 12 micro-batches, B = 8, of 1000 elements."""
    strided_ = check(12, 8, (2, 2), Where.OWNER)
    # T(0,2) lies where the sum is going to be; then a whole block; then T(8,2), the last one.
    assert [strided_.kept_bytes(step, 0, 1000) for step in range(3)] == [0, 0, 0]
    longer = check(16, 8, (2, 2), Where.OWNER)
    assert [longer.kept_bytes(step, 0, 1000) for step in range(4)] == [0, 0, 1000, 0]
    turns = check(16, 8, (2, 2), Where.NODE)
    assert [turns.kept_bytes(step, 0, 1000) for step in range(4)] == [2000, 2000, 4000, 0]
    local = check(16, 8, (2, 2), Where.LOCAL)
    assert [local.kept_bytes(step, 0, 1000) for step in range(4)] == [4000, 4000, 8000, 0]


def test_the_most_that_is_under_way_is_one_gradient_and_what_becomes_of_it() -> None:
    """Four ranks of one node, in bf16: a gradient, parts of the others, sums, and the shard."""
    plan = check(4, 4, (4,), Where.OWNER)
    assert plan.most_under_way(2) == 2 + (3 * 2) / 4 + 4 / 4 + 4 / 4
    packed = 65 / 64  # of a whole block: beside its sum where it is rounded, and at its owner
    assert plan.most_under_way(2, packed) == plan.most_under_way(2) + 2 * packed / 4


# ---- traffic ----


def counted(plan: Plan, elements: int, gradient_bytes: int) -> tuple[int, int]:
    """Inside nodes and between them, message by message."""
    inside = between = 0
    for step, rank in itertools.product(range(len(plan.micro_steps)), range(plan.world)):
        messages = [*messages_inside(plan, step, rank), *messages_to_owners(plan, step, rank)]
        for message in messages:
            sizes = [gradient_bytes if plan.expression.is_single(p) else 4 for p in message.pieces]
            sent = sum(sizes) * (message.stop - message.start) * elements // plan.parts
            if plan.slices.topology.place(rank)[0] == plan.slices.topology.place(message.target)[0]:
                inside += sent
            else:
                between += sent
    return inside, between


@pytest.mark.parametrize("where", Where)
@pytest.mark.parametrize("nodes", [(1,), (4,), (1, 1, 1), (2, 2), (3, 1, 1), (2, 4)], ids=str)
def test_the_traffic_is_that_of_all_messages(nodes: tuple[int, ...], where: Where) -> None:
    for block, count in itertools.product([1, 8], [1, 13, 24]):
        plan = check(count, block, nodes, where)
        elements = 10 * plan.parts
        by_plan = traffic(plan, elements, 2)
        sent = sum(by_plan.inside_bytes), sum(by_plan.between_bytes)
        assert sent == counted(plan, elements, 2)


@pytest.mark.parametrize(("nodes", "size"), [(8, 8), (128, 8)])
def test_between_equal_nodes_a_micro_step_costs_one_piece_of_each_node(
    nodes: int, size: int
) -> None:
    """What a hierarchical ring in fp32 sends: 4 N (1 - 1 / nodes), at accumulation 1."""
    world, elements = nodes * size, 1 << 20
    plan = plan_reduction(strided(world).rows(world), block=8, nodes=(size,) * nodes)
    sent = traffic(plan, elements, 2)
    assert sent.between_bytes == (4 * elements * (nodes - 1) // nodes,) * nodes
    assert sent.inside_bytes == (2 * elements * (size - 1),) * nodes


def test_at_the_sender_a_piece_of_each_node_and_block_travels() -> None:
    rows = node_turns((8,) * 8, 16).rows(8 * 64)
    plan = plan_reduction(rows, block=16, nodes=(8,) * 8, where=Where.NODE)
    assert len(rows) == 8
    assert traffic(plan, 1 << 20, 2).between_bytes == (4 * (4 << 20) * 7 // 8,) * 8


def test_owners_on_rails_get_slices_that_are_whole_shards() -> None:
    assert rail_order((2, 2, 2)) == (0, 2, 4, 1, 3, 5)
    plan = plan_reduction(strided(6).rows(6), block=8, nodes=(2, 2, 2))
    assert [message.target for message in messages_to_owners(plan, 0, 3)] == [1, 5]
    assert sorted(rail_order((3, 1, 2))) == list(range(6))


# ---- what is refused ----


@pytest.mark.parametrize(
    ("rows", "nodes", "block", "message"),
    [
        ([[0, 1]], (2,), 6, "a block of 6 micro-batches: give a power of two"),
        ([[0, 1]], (3,), 8, r"nodes of \[3\] ranks need 3 entries in each"),
        ([[0, 2]], (2,), 8, "every micro-batch from 0 on must be run, and each once"),
        ([[0, 0]], (2,), 8, "every micro-batch from 0 on must be run, and each once"),
    ],
)
def test_what_is_no_assignment_is_refused(
    rows: list[list[int | None]], nodes: tuple[int, ...], block: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_reduction(rows, block=block, nodes=nodes)


@pytest.mark.parametrize("where", [Where.NODE, Where.LOCAL])
def test_sums_that_are_formed_before_they_travel_save_what_is_between_nodes(where: Where) -> None:
    """Two nodes of two in bf16, 8 micro-batches of each rank: an 8th of a ring in every one."""
    ring_bytes = 4 * 1000 // 2  # fp32 sums: what a node sends of a hierarchical reduce-scatter
    for micro_steps, block, sent in ((1, 8, ring_bytes), (8, 16, ring_bytes)):
        rows = assignment(where, (2, 2), block, 4 * micro_steps).rows(4 * micro_steps)
        plan = plan_reduction(rows, block=block, nodes=(2, 2), where=where)
        assert traffic(plan, 1000, gradient_bytes=2).between_bytes == (sent, sent)


@pytest.mark.parametrize(
    ("where", "nodes", "block", "micro_steps", "quarter"),
    [
        (Where.OWNER, (8, 8), 8, 1, True),
        (Where.OWNER, (8, 8), 4, 2, True),
        (Where.OWNER, (4, 4), 8, 2, False),  # a block is spread over two nodes
        (Where.OWNER, (1, 1), 1, 2, True),
        (Where.NODE, (2, 2), 8, 4, True),
        (Where.LOCAL, (2, 4), 8, 8, True),
    ],
)
def test_blocks_that_lie_in_one_node_travel_as_a_quarter_of_their_sum(
    where: Where, nodes: tuple[int, ...], block: int, micro_steps: int, quarter: bool
) -> None:
    """In fp32; int8 and its scales are 65/64 bytes of an element."""
    count = sum(nodes) * micro_steps
    rows = assignment(where, nodes, block, count).rows(count)
    plan = plan_reduction(rows, block=block, nodes=nodes, where=where)
    exact, rounded = (traffic(plan, 3 << 20, 4, size).between_bytes for size in (None, 65 / 64))
    assert rounded == (tuple(each * 65 // 256 for each in exact) if quarter else exact)
