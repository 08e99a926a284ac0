"""The ordered reduction inside of nodes first: between nodes only sums travel.

Owns the two exchanges of a micro-step, each in a group of its own. In the first each rank gets, of
all micro-batches of its node, the slice that it adds up; in the second the owners get what their
shards are in the pieces of all nodes, whole blocks as int8 if the sum rounds them. A rank adds
siblings alone, so the bits are those of the flat reduction, `reduction`, whose interface this has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from zero_comm.exchange.collectives import Collectives, wait
from zero_comm.sums.additions import Addition, Memory, lead
from zero_comm.sums.buffer_pool import BufferPool
from zero_comm.sums.fold import run_additions
from zero_comm.sums.ordered_sum import OrderedSum, form_pieces
from zero_comm.sums.plan import Expression, Formed, MicroStep, Piece
from zero_comm.sums.quantization import QUANT_BLOCK, pack, packed_size, unpack
from zero_comm.sums.reduction import Reducing, Turn
from zero_comm.sums.spill import KeptSums, Spill
from zero_comm.topology import Slices
from zero_comm.waiting import Interrupt


class HeldPieces:
    """The sender's half of `plan`, for one gradient or the slice of it that a rank adds up.

    What comes is added to what is held between micro-steps, and passed on when the plan says so.
    """

    def __init__(self, spill: Spill) -> None:
        self._spill = spill
        self._held: dict[int, KeptSums] = {}

    def clear(self) -> None:
        """Drop what is held, of a step that has not ended."""
        while self._held:
            self._spill.drop(self._held.popitem()[1])

    def __iter__(self) -> Iterator[Tensor]:
        """The held tensors."""
        return (kept.tensor for kept in self._held.values())

    def add(
        self, given: Sequence[Tensor], formed: Formed, pool: BufferPool
    ) -> list[tuple[Piece, Tensor]]:
        """Add what comes to what is held, as the plan says of this micro-step.

        What is given is used up.

        Returns:
            What is passed on: sums in memory of the pool, single gradients also where they were.
        """
        fetched = self._fetch(formed, pool)
        memory: dict[Memory, Tensor] = {}
        at: dict[int, Memory] = {}
        for start, tensor in fetched.items():
            # A gradient that nothing has been added to is as narrow as one that is given.
            at[start] = Memory("kept" if tensor.dtype == torch.float32 else "given", start)
            memory[at[start]] = tensor
        for piece, tensor in zip(formed.takes, given, strict=True):
            at[piece.start] = Memory("given", piece.start)
            memory[at[piece.start]] = tensor
        additions = [
            Addition(at[left.start], at[left.start], at.pop(right.start))
            for left, right in ((merge.left, merge.right) for merge in formed.merges)
        ]
        keeps = [piece for piece in formed.keeps if piece.start not in self._held]
        for piece in (*formed.gives, *keeps):
            source = at[piece.start]
            is_sum = any(addition.target == source for addition in additions)
            # A held single gradient is called "given", too, and its memory is not the caller's.
            is_given = source.kind == "given" and piece.start not in fetched
            # Not where the gradient was, whose memory can be used again.
            if (is_sum and source.kind == "given") or (is_given and piece in keeps):
                at[piece.start] = home = Memory("kept", piece.start)
                dtype = torch.float32 if is_sum else memory[source].dtype
                memory[home] = pool.take(memory[source].numel(), dtype)
                lead(additions, source, home)
        if additions:
            run_additions(additions, memory, torch.float32, pool)
        passed = [(piece, memory[at[piece.start]]) for piece in formed.gives]
        for piece in keeps:
            self._held[piece.start] = self._spill.keep(piece, memory[at[piece.start]])
        # What was added to another piece is free; a target is kept or passed on under its name.
        used = {id(tensor) for tensor in (*self, *(tensor for _, tensor in passed))}
        for tensor in fetched.values():
            if id(tensor) not in used:
                pool.give(tensor)
        self._spill.balance(self._held.values(), pool)
        return passed

    def _fetch(self, formed: Formed, pool: BufferPool) -> dict[int, Tensor]:
        """Take the held pieces that are added or passed on, by start."""
        merged = (piece for merge in formed.merges for piece in (merge.left, merge.right))
        wanted = {piece.start for piece in (*merged, *formed.gives)}
        return {
            start: self._spill.take(self._held.pop(start), pool)
            for start in tuple(self._held)
            if start in wanted
        }


_OPEN = 1 << 62
"""Micro-batches of a step whose end is not known: no piece is named by what is absent."""


def apart(collectives: Collectives, device: torch.device, interrupt: Interrupt) -> Collectives:
    """A group of the same ranks, laid out alike, for nothing but these exchanges. Collective.

    Raises:
        PeerLost: A peer is lost.
    """
    group = dist.new_group(timeout=timedelta(seconds=collectives.timeout_s))
    sums = Collectives(group, interrupt, beside=collectives, watched=True)
    sums.lay_out(collectives.topology, collectives.owners)
    sums.meet(device)
    return sums


@dataclass(frozen=True, slots=True)
class _Held:
    """The pieces of one gradient that one rank keeps between micro-steps; none without a plan."""

    own: HeldPieces
    """Of its own micro-batches: all elements."""
    of_node: HeldPieces
    """Of those of its node: its slice."""


class NodeReduction:
    """A reduce-scatter whose sums begin inside of nodes; see `OrderedReduction`."""

    def __init__(self, inside: Collectives, between: Collectives, pool: BufferPool) -> None:
        """Reduce over two groups of the same ranks, laid out by nodes: one for each exchange.

        Nothing else may exchange in them: a rank that waits here for a sum must not keep another
        exchange waiting. They may be one where ranks may begin exchanges in any order.
        """
        self.collectives = inside
        self.between = between
        self.pool = pool
        topology = inside.topology
        self.nodes = [topology.ranks(node) for node in range(len(topology.nodes))]
        self._held = WeakKeyDictionary[OrderedSum, _Held]()  # a sum may go in mid-step
        self._schedule: tuple[Turn, int, int, _Schedule] | None = None

    def start(self, gradient: Tensor, what: str, into: OrderedSum, turn: Turn) -> Reducing:
        """See `OrderedReduction.start`; nothing is pending if nothing travels in it."""
        held = self._held.get(into)
        if held is None:
            held = self._held[into] = _Held(HeldPieces(into.spill), HeldPieces(into.spill))
        # A step that ended in an error has left pieces.
        if turn.first:
            held.own.clear()
            held.of_node.clear()
        return _Divided(self, gradient, what, into, turn, held)

    def schedule(self, turn: Turn, into: OrderedSum) -> _Schedule:
        """The schedule of a micro-step: the same object for all gradients."""
        begin, known = 0 if turn.first else into.count, self._schedule
        # By identity: the turn of a micro-step is one object, whose plan is too large to compare.
        if known is None or known[0] is not turn or known[1:3] != (begin, into.block):
            found = _Schedule.of(turn, begin, into.block, self.nodes)
            self._schedule = known = turn, begin, into.block, found
        return known[3]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Schedule:
    """Which pieces are formed in one micro-step."""

    expression: Expression
    by_rank: tuple[tuple[Piece, ...], ...]
    """The pieces that each rank passes on inside of its node."""
    by_node: tuple[tuple[Piece, ...], ...]
    """Those that each node passes on to owners."""
    step: MicroStep | None = None
    """Its part of the plan; None: nobody keeps anything but owners."""

    @classmethod
    def of(cls, turn: Turn, begin: int, block: int, nodes: Sequence[range]) -> _Schedule:
        """The schedule of a micro-step; without a plan, from its first micro-batch and B."""
        if turn.plan is not None:
            step = turn.plan.micro_steps[turn.micro_step]
            return cls(
                expression=turn.plan.expression,
                by_rank=tuple(rank.gives for rank in step.ranks),
                by_node=tuple(node.gives for node in step.nodes),
                step=step,
            )
        expression = Expression(micro_batches=_OPEN, block=block)
        live = [[begin + rank for rank in ranks if rank < turn.live] for ranks in nodes]
        return cls(
            expression=expression,
            by_rank=tuple(
                (Piece(begin + rank, 0),) if rank < turn.live else ()
                for ranks in nodes
                for rank in ranks
            ),
            by_node=tuple(map(expression.pieces, live)),
        )


class _Divided(Reducing):
    """The gradients of one micro-step, on their way."""

    def __init__(
        self,
        via: NodeReduction,
        gradient: Tensor,
        what: str,
        into: OrderedSum,
        turn: Turn,
        held: _Held,
    ) -> None:
        self._via = via
        self._what = what
        self._into = into
        self._turn = turn
        self._held = held
        self._taken: list[Tensor] = []
        self._arrived: list[tuple[Piece, Tensor]] | None = None
        self._packed: list[tuple[Tensor, Tensor]] = []
        """Buffers for what comes as int8, and its place in fp32."""
        self._dtype = gradient.dtype
        # Its storage: what is sent may be views of it.
        self._gradient = gradient.untyped_storage().data_ptr()
        group = via.collectives
        topology = group.topology
        self._node, _ = topology.place(group.rank)
        self._ranks = via.nodes[self._node]
        self._schedule = via.schedule(turn, into)
        self._slices = Slices(
            topology=topology,
            owners=group.owners,
            elements=gradient.numel(),
            # Values that are rounded together are in one slice.
            grain=QUANT_BLOCK if into.rounds else 1,
        )
        self._exchange_inside(self._pass_on(gradient))

    def advance(self) -> bool:
        """See `Reducing`."""
        for pending in self.pending:
            wait(pending)
        if self._arrived is not None:
            for packed, into in self._packed:
                unpack(packed.view(1, -1), into.view(1, -1))
            self._into.add_pieces(
                self._arrived, self._via.pool, first=self._turn.first, last=self._turn.last
            )
            while self._taken:
                self._via.pool.give(self._taken.pop())
            return False
        # What has come inside of the node is added, and goes to owners. Every rank knows from the
        # plan what it is sent, so no sizes are exchanged first.
        group, by_node = self._via.collectives, self._schedule.by_node
        formed, pending_now = self._form(), []
        self._arrived = []
        for turn in range(max(map(len, by_node))):
            held = formed[turn] if turn < len(formed) else {}
            wanted: dict[int, Tensor] = {}
            for pieces, sources in zip(by_node, self._slices.sources(group.rank), strict=True):
                if turn < len(pieces):
                    self._expect(pieces[turn], sources, held, wanted)
            what = f"{self._what}, sums, {turn}"
            pending_now.append(self._via.between.exchange_pieces(held, wanted, what))
        self.pending = tuple(pending_now)
        return True

    def _take(self, numel: int, dtype: torch.dtype) -> Tensor:
        self._taken.append(self._via.pool.take(numel, dtype))
        return self._taken[-1]

    def _dtype_of(self, piece: Piece) -> torch.dtype:
        """The dtype of a piece; a single gradient is as narrow as it was computed."""
        return self._dtype if self._schedule.expression.is_single(piece) else torch.float32

    def _is_rounded(self, piece: Piece) -> bool:
        """Whether it goes to its owners as int8."""
        return self._into.rounds and self._schedule.expression.is_block(piece)

    def _note_taken(self, formed: Sequence[tuple[Piece, Tensor]], given: Sequence[Tensor]) -> None:
        """Remember which pieces lie in memory of the pool."""
        # A single gradient is passed on where it lies: that memory is not the pool's.
        known = {each.data_ptr() for each in given}
        self._taken += [each for _, each in formed if each.data_ptr() not in known]

    def _pass_on(self, gradient: Tensor) -> list[Tensor]:
        """The pieces that this rank passes on inside of its node."""
        rank = self._via.collectives.rank
        if self._schedule.step is None:
            return [gradient] if self._schedule.by_rank[rank] else []
        formed = self._schedule.step.ranks[rank]
        # With nothing to add and nothing to keep, a gradient travels from where it lies.
        if not formed.keeps and formed.gives == formed.takes:
            return [gradient] if formed.gives else []
        given = [gradient] if formed.takes else []
        passed = self._held.own.add(given, formed, self._via.pool)
        self._note_taken(passed, given)
        return [each for _, each in passed]

    def _exchange_inside(self, passed: Sequence[Tensor]) -> None:
        group, pending = self._via.collectives, []
        own = self._slices.slice_of(group.rank)
        of_node: list[tuple[Piece, Tensor]] = []
        # As many exchanges as the most pieces of a rank: all ranks must begin the same ones.
        for turn in range(max(map(len, self._schedule.by_rank))):
            held, wanted = {}, {}
            if turn < len(passed):
                for rank in self._ranks:
                    theirs = self._slices.slice_of(rank)
                    held[rank] = passed[turn][theirs.start : theirs.stop]
            for rank in self._ranks:
                for piece in self._schedule.by_rank[rank][turn : turn + 1]:
                    mine = rank == group.rank
                    dtype = self._dtype_of(piece)
                    wanted[rank] = held[rank] if mine else self._take(len(own), dtype)
                    of_node.append((piece, wanted[rank]))
            what = f"{self._what}, {turn}" if turn else self._what
            pending.append(group.exchange_pieces(held, wanted, what))
        # They came by turn and rank; the plan takes them in the order of micro-batches.
        self._of_node = [tensor for _, tensor in sorted(of_node, key=lambda each: each[0])]
        self.pending = tuple(pending)

    def _form(self) -> list[dict[int, Tensor]]:
        """Add this rank's slice of what has come inside of the node; piece by piece, by owner."""
        pool, step = self._via.pool, self._schedule.step
        formed: list[tuple[Piece, Tensor]] = []
        if step is not None:
            formed = self._held.of_node.add(self._of_node, step.nodes[self._node], pool)
        elif self._of_node:
            start = self._schedule.by_rank[self._ranks.start][0].start
            formed = form_pieces(self._of_node, start, self._into.block, pool)
        self._note_taken(formed, self._of_node)
        rank = self._via.collectives.rank
        own, routes = self._slices.slice_of(rank), list(self._slices.routes(rank))
        sent = [
            {
                owner: self._as_sent(piece, whole[start - own.start : stop - own.start])
                for owner, start, stop in routes
            }
            for piece, whole in formed
        ]
        # Free what nothing that is sent lies in, before the sums travel: the next gradient takes
        # this memory while they are on their way.
        used = {part.untyped_storage().data_ptr() for parts in sent for part in parts.values()}
        taken, self._taken, self._of_node = self._taken, [], []
        for each in taken:
            if each.untyped_storage().data_ptr() in used:
                self._taken.append(each)
            else:
                pool.give(each)
        self.holds_gradient = self._gradient in used
        return sent

    def _as_sent(self, piece: Piece, part: Tensor) -> Tensor:
        if not self._is_rounded(piece):
            return part
        packed = self._take(packed_size(part.numel()), torch.uint8)
        pack(part.view(1, -1), packed.view(1, -1))
        return packed

    def _expect(
        self,
        piece: Piece,
        sources: Sequence[tuple[int, int, int]],
        held: Mapping[int, Tensor],
        wanted: dict[int, Tensor],
    ) -> None:
        """Find the memory for this rank's shard of a piece, whose parts come from some ranks."""
        assert self._arrived is not None
        rank, is_rounded = self._via.collectives.rank, self._is_rounded(piece)
        if [source for source, _, _ in sources] == [rank] and not is_rounded:
            # This rank formed all of its shard: it is added from where it lies.
            self._arrived.append((piece, held[rank]))
            return
        shard = self._slices.shard_of(rank)
        whole = self._take(len(shard), torch.float32 if is_rounded else self._dtype_of(piece))
        for source, start, stop in sources:
            part = whole[start - shard.start : stop - shard.start]
            if is_rounded and source == rank:
                # Its own part is rounded as well: the bits must not depend on who formed it.
                self._packed.append((held[rank], part))
            elif is_rounded:
                wanted[source] = self._take(packed_size(len(part)), torch.uint8)
                self._packed.append((wanted[source], part))
            elif source == rank:
                part.copy_(held[rank])
            else:
                wanted[source] = part
        self._arrived.append((piece, whole))
