"""The ordered reduce-scatter of one step as a plan: who adds what to what, and where.

Owns the expression that every sum of gradients is, and its distribution over ranks. The expression,
for micro-batches 0 .. L-1 and a block of B of them, B a power of two:

    T(a, 0) = fp32(gradient of micro-batch a)
    T(a, k) = T(a, k-1) + T(a + 2**(k-1), k-1)      a micro-batch that is absent: x + nothing = x
    S       = ((T_0 + T_1) + T_2) + ...              T_q = T(q * B, log2 B)

It depends on the numbers of the micro-batches alone. Assignment, nodes, the world size and the mode
decide only where a sum is formed. A run may round each T_q to int8 and back before it is added to
the chain; see `quantization`.

A plan has three tiers. A *rank* has the gradients of its own micro-batches. Each rank of a *node*
holds one slice of the pieces that the node forms of them: the n-th of G. The *owner* of a shard
receives the pieces of all nodes and ends the sum. In a tier everybody does the same, each on its
own part of the elements.

Standard library only: the memory estimate, models of large clusters and the docs read plans, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import lcm

from zero_comm.topology import Slices, Topology, rail_order, runs

SUM_BYTES = 4
"""Of an element of a sum: fp32."""

DEFAULT_BLOCK = 8
"""B where nobody has chosen otherwise; never derived from nodes or world size."""

Rows = Sequence[Sequence[int | None]]
"""For each micro-step, the micro-batch that each rank runs; None: a padding micro-batch."""


class Where(StrEnum):
    """Where the pieces of several micro-steps are added."""

    OWNER = "owner"
    """At the owner: what a node has formed travels in every micro-step."""
    NODE = "node"
    """At the sender: a node keeps a piece until it has no further part of it to run."""
    LOCAL = "local"
    """On each rank, whole gradients; they travel once, in the last micro-step."""


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """T(start, level): the sum over micro-batches [start, start + 2**level), as far as there are.

    Its level is the highest that it can be called by: absent micro-batches add nothing.
    """

    start: int
    level: int


@dataclass(frozen=True, slots=True)
class Merge:
    """The addition of two siblings, left + right."""

    left: Piece
    right: Piece


@dataclass(frozen=True, kw_only=True, slots=True)
class Formed:
    """The actions of one place in one micro-step, in this order."""

    takes: tuple[Piece, ...]
    """The pieces that come to it, in the order in which it takes them."""
    merges: tuple[Merge, ...]
    gives: tuple[Piece, ...]
    """The pieces that it passes on; of an owner, the blocks that it adds to the chain, in order."""
    keeps: tuple[Piece, ...]
    """The pieces that are pending afterwards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroStep:
    """One micro-step of all ranks, nodes and owners."""

    ranks: tuple[Formed, ...]
    nodes: tuple[Formed, ...]
    owner: Formed
    """Of every owner, on its shard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expression:
    """The way in which the sum over some micro-batches is written."""

    micro_batches: int
    block: int

    def __post_init__(self) -> None:
        if self.block < 1 or self.block & (self.block - 1):
            raise ValueError(f"a block of {self.block} micro-batches: give a power of two")

    @property
    def levels(self) -> int:
        """The level of a whole block."""
        return self.block.bit_length() - 1

    def named(self, start: int, level: int) -> Piece:
        """T(start, level) by its highest level."""
        while (
            level < self.levels
            and not start >> level & 1
            and start + (1 << level) >= self.micro_batches
        ):
            level += 1
        return Piece(start, level)

    def is_single(self, piece: Piece) -> bool:
        """Whether it is one micro-batch's gradient: no sum, so it can travel in its own dtype."""
        return piece.level == 0 or piece.start + 1 >= self.micro_batches

    def is_block(self, piece: Piece) -> bool:
        """Whether it is whole: the next thing to be done with it is to add it to the chain."""
        return piece.level == self.levels

    def pieces(self, held: Iterable[int]) -> tuple[Piece, ...]:
        """The fewest pieces that some micro-batches can be added up to, in order."""
        found: list[Piece] = []
        for start, stop in runs(sorted(held)):
            ends = stop == self.micro_batches  # what is absent is held by everybody
            at = start
            while at < stop:
                level = 0
                # The largest piece that begins here: its siblings are all held.
                while (
                    level < self.levels
                    and not at >> level & 1
                    and (ends or at + (2 << level) <= stop)
                ):
                    level += 1
                found.append(Piece(at, level))
                at += 1 << level
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The sum of one step: what every place forms, in every micro-step."""

    expression: Expression
    nodes: tuple[int, ...]
    """Ranks of each node; the ranks of a node are consecutive."""
    owners: tuple[int, ...]
    """By shard, the rank that owns it."""
    micro_steps: tuple[MicroStep, ...]

    @property
    def world(self) -> int:
        """Ranks."""
        return sum(self.nodes)

    @property
    def parts(self) -> int:
        """The parts of a gradient: every slice and every shard is some of them."""
        return lcm(self.world, *self.nodes)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Where each micro-batch is run: its micro-step * world + its rank."""
        ranks = enumerate(rank for step in self.micro_steps for rank in step.ranks)
        run = {piece.start: place for place, rank in ranks for piece in rank.takes}
        return tuple(run[number] for number in range(len(run)))

    @cached_property
    def slices(self) -> Slices:
        """The parts of a gradient that each rank forms for its node, and those that it owns."""
        return Slices(topology=Topology(nodes=self.nodes), owners=self.owners, elements=self.parts)

    def kept_bytes(self, micro_step: int, rank: int, elements: int) -> int:
        """Pieces that a rank keeps after a micro-step, in three tiers, beside its own sum."""
        # A piece that begins at 0 costs an owner nothing: it is kept where the sum is going to be.
        step, (node, _) = self.micro_steps[micro_step], self.slices.topology.place(rank)
        beside = sum(piece.start > 0 for piece in step.owner.keeps)
        parts = (
            len(step.ranks[rank].keeps) * self.parts
            + len(step.nodes[node].keeps) * len(self.slices.slice_of(rank))
            + beside * (self.parts // self.world)
        )
        return parts * elements * SUM_BYTES // self.parts

    def most_under_way(self, gradient_bytes: float, block_bytes: float | None = None) -> float:
        """The most bytes on a rank, for each element of a gradient, while it is on its way.

        One gradient is in the exchange inside of nodes, with what has come of others; the pieces of
        the one before travel to their owners.

        `gradient_bytes` and `block_bytes` are of an element of a micro-batch's gradient and of a
        whole block that is rounded, on its way; there and at its owner it is beside its sum in
        fp32. None: blocks are not rounded.
        """
        most, whole_bytes = 0.0, None if block_bytes is None else block_bytes + SUM_BYTES
        for step in self.micro_steps:
            given_bytes = (
                self.bytes_of(node.gives, gradient_bytes, whole_bytes) for node in step.nodes
            )
            owned = sum(given_bytes) / self.world
            first = 0
            for size, node in zip(self.nodes, step.nodes, strict=True):
                given = [
                    self.bytes_of(rank.gives, gradient_bytes)
                    for rank in step.ranks[first : first + size]
                ]
                first += size
                # The rank that has the least of its own receives the most.
                received = (sum(given) - min(given)) / size
                sums = [piece for piece in node.gives if not self.expression.is_single(piece)]
                is_held = len(sums) < len(node.gives)  # a single one travels from where it was
                formed = len(sums) * SUM_BYTES / size + is_held * gradient_bytes
                if block_bytes is not None:
                    blocks = sum(map(self.expression.is_block, node.gives))
                    formed += blocks * block_bytes / size
                most = max(most, gradient_bytes + received + formed + owned)
        return most

    def bytes_of(
        self, pieces: Iterable[Piece], gradient_bytes: float, block_bytes: float | None = None
    ) -> float:
        """Of one element of each piece."""
        total = 0.0
        for piece in pieces:
            if block_bytes is not None and self.expression.is_block(piece):
                total += block_bytes
            else:
                total += gradient_bytes if self.expression.is_single(piece) else SUM_BYTES
        return total


def most_pending(block: int, world: int, micro_batches: int) -> int:
    """The most pieces that an owner keeps beside its sum, between strided micro-steps of a step."""
    micro_steps = -(-micro_batches // world)
    kept = 0
    for done in range(world, min(micro_steps, 2 * block) * world, world):  # it repeats after that
        # The pieces of a part of a block are the binary digits of its size; one at 0 is the sum's
        # own.
        kept = max(kept, (done % block).bit_count() - (done < block))
    return kept


def plan_reduction(
    rows: Rows,
    *,
    block: int,
    nodes: Sequence[int],
    where: Where = Where.OWNER,
    owners: Sequence[int] | None = None,
) -> Plan:
    """Plan the sum of one step.

    Args:
        rows: Who runs what; every micro-batch once.
        block: B, a power of two.
        nodes: Ranks of each node, in the order of ranks.
        where: The pieces of several micro-steps are added.
        owners: By shard, the rank that owns it; by default in the order of rails.

    Raises:
        ValueError: The rows are not an assignment to these nodes, or the block is no power of two.
    """
    _check(rows, nodes)
    expression = Expression(
        micro_batches=sum(number is not None for row in rows for number in row), block=block
    )
    by_rank = list(_rank_tier(rows, expression, where))
    by_node = list(zip(*_node_tier(by_rank, rows, nodes, expression, where), strict=True))
    owned = _owner_tier(by_node, expression)
    return Plan(
        expression=expression,
        nodes=tuple(nodes),
        owners=tuple(rail_order(nodes) if owners is None else owners),
        micro_steps=tuple(
            MicroStep(ranks=ranks, nodes=of_nodes, owner=owner)
            for ranks, of_nodes, owner in zip(by_rank, by_node, owned, strict=True)
        ),
    )


def _check(rows: Rows, nodes: Sequence[int]) -> None:
    world = sum(nodes)
    if not rows or not nodes or min(nodes) < 1 or any(len(row) != world for row in rows):
        raise ValueError(
            f"nodes of {list(nodes)} ranks need {world} entries in each of one or more rows"
        )
    numbers = sorted(number for row in rows for number in row if number is not None)
    if numbers != list(range(len(numbers))) or not numbers:
        raise ValueError("every micro-batch from 0 on must be run, and each once")


def _formed(
    held: Mapping[int, Piece], takes: Iterable[Piece], expression: Expression
) -> tuple[dict[int, Piece], list[Merge]]:
    """The held pieces by start, after some more have come and siblings have been added."""
    now, merges = dict(held), list[Merge]()
    for taken in sorted(takes):
        piece = expression.named(taken.start, taken.level)
        while not expression.is_block(piece):
            size = 1 << piece.level
            # Pieces of a level are aligned: this one's sibling begins where that one bit differs.
            other = now.get(piece.start ^ size)
            if other is None or other.level != piece.level:
                break
            del now[other.start]
            left, right = sorted((piece, other))
            merges.append(Merge(left, right))
            piece = expression.named(left.start, piece.level + 1)
        now[piece.start] = piece
    return now, merges


def _rank_tier(rows: Rows, expression: Expression, where: Where) -> Iterator[tuple[Formed, ...]]:
    """All ranks in each micro-step."""
    held: list[dict[int, Piece]] = [{} for _ in rows[0]]
    for micro_step, row in enumerate(rows, start=1):
        formed = []
        for rank, number in enumerate(row):
            takes = () if number is None else (Piece(number, 0),)
            if where is not Where.LOCAL:  # nothing is kept: a gradient travels as it is
                formed.append(Formed(takes=takes, merges=(), gives=takes, keeps=()))
                continue
            held[rank], merges = _formed(held[rank], takes, expression)
            pieces = tuple(sorted(held[rank].values()))
            last = micro_step == len(rows)
            gives, keeps = (pieces, ()) if last else ((), pieces)
            formed.append(Formed(takes=takes, merges=tuple(merges), gives=gives, keeps=keeps))
        yield tuple(formed)


def _node_tier(
    by_rank: Sequence[Sequence[Formed]],
    rows: Rows,
    nodes: Sequence[int],
    expression: Expression,
    where: Where,
) -> Iterator[list[Formed]]:
    """Each node in all micro-steps."""
    first = 0
    for size in nodes:
        ranks = slice(first, first + size)
        first += size
        run = [[number for number in row[ranks] if number is not None] for row in rows]
        # A piece is passed on when the node has run all of it: in this micro-step, or in the step.
        if where is Where.OWNER:
            complete = {piece for numbers in run for piece in expression.pieces(numbers)}
        else:
            complete = set(expression.pieces(number for numbers in run for number in numbers))
        held: dict[int, Piece] = {}
        steps = []
        for formed in by_rank:
            takes = tuple(sorted(piece for rank in formed[ranks] for piece in rank.gives))
            held, merges = _formed(held, takes, expression)
            gives = tuple(sorted(piece for piece in held.values() if piece in complete))
            for piece in gives:
                del held[piece.start]
            keeps = tuple(sorted(held.values()))
            steps.append(Formed(takes=takes, merges=tuple(merges), gives=gives, keeps=keeps))
        yield steps


def _owner_tier(by_node: Sequence[Sequence[Formed]], expression: Expression) -> Iterator[Formed]:
    """An owner in all micro-steps: siblings first, then blocks in their order."""
    held: dict[int, Piece] = {}
    expected = 0
    for formed in by_node:
        takes = tuple(sorted(piece for node in formed for piece in node.gives))
        held, merges = _formed(held, takes, expression)
        gives = []
        # The chain adds blocks in their order: one that is complete before its turn waits.
        while expected in held and expression.is_block(held[expected]):
            gives.append(held.pop(expected))
            expected += expression.block
        keeps = tuple(sorted(held.values()))
        yield Formed(takes=takes, merges=tuple(merges), gives=tuple(gives), keeps=keeps)
