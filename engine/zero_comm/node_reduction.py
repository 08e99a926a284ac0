"""The ordered reduction inside of nodes first: between nodes only sums travel.

Owns the two exchanges of a micro-step. In the first each rank gets, of all micro-batches of its
node, the slice that it adds up; in the second the owners get what their shards are in the pieces of
all nodes. Must always hold: a rank adds siblings alone (`ordered_sum.form_pieces`), so the bits are
those of the flat reduction; what travels follows from the number of micro-batches and the topology,
so every rank knows what it is sent.

`reduction` is the flat one, and the interface of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from zero_comm.buffer_pool import BufferPool
from zero_comm.collectives import Collectives, wait
from zero_comm.ordered_sum import OrderedSum, form_pieces
from zero_comm.reduction import Reducing, Turn
from zero_comm.reduction_plan import Expression, Piece
from zero_comm.topology import Slices
from zero_comm.waiting import Interrupt

_OPEN = 1 << 62
"""Micro-batches of a step whose end is not known: no piece is named by what is absent."""


def apart(collectives: Collectives, device: torch.device, interrupt: Interrupt) -> Collectives:
    """A group of the same ranks, laid out alike, for nothing but these exchanges. Collective.

    Args:
        collectives: The group of all ranks.
        device: Where gradients are.
        interrupt: Ends every wait.

    Raises:
        PeerLost: A peer is lost.
    """
    group = dist.new_group(timeout=timedelta(seconds=collectives.timeout_s))
    sums = Collectives(group, interrupt, detector=collectives.detector, watched=True)
    sums.lay_out(collectives.topology)
    sums.meet(device)
    return sums


class NodeReduction:
    """A reduce-scatter whose sums begin inside of nodes; see `OrderedReduction`."""

    steps = 2

    def __init__(self, collectives: Collectives, pool: BufferPool) -> None:
        """Reduce over a group that is laid out by nodes.

        Args:
            collectives: The group; nothing else may exchange in it, because a rank that waits here
                for a sum must not keep another exchange waiting.
            pool: Of what is received and formed.
        """
        self.collectives = collectives
        self.pool = pool

    def start(self, gradient: Tensor, what: str, into: OrderedSum, turn: Turn) -> Reducing:
        """As `OrderedReduction.start`."""
        return _Divided(self, gradient, what, into, turn)


class _Divided(Reducing):
    """The gradients of one micro-step, on their way."""

    def __init__(
        self, via: NodeReduction, gradient: Tensor, what: str, into: OrderedSum, turn: Turn
    ) -> None:
        self._via = via
        self._what = what
        self._into = into
        self._turn = turn
        self._taken: list[Tensor] = []
        self._arrived: list[tuple[Piece, Tensor]] | None = None
        group = via.collectives
        self._begin = 0 if turn.first else into.count
        self._slices = Slices(
            topology=group.topology, owners=group.owners, elements=gradient.numel()
        )
        self._exchange_inside(gradient)

    def advance(self) -> bool:
        """As in `Reducing`."""
        for pending in self.pending:
            wait(pending)
        if self._arrived is None:
            self._exchange_between()
            return True
        self._into.add_pieces(
            self._arrived, self._via.pool, first=self._turn.first, last=self._turn.last
        )
        while self._taken:
            self._via.pool.give(self._taken.pop())
        return False

    def _take(self, numel: int, dtype: torch.dtype) -> Tensor:
        self._taken.append(self._via.pool.take(numel, dtype))
        return self._taken[-1]

    def _live(self, node: int) -> range:
        """The ranks of a node that have run micro-batches."""
        ranks = self._slices.topology.ranks(node)
        return range(ranks.start, max(ranks.start, min(ranks.stop, self._turn.live)))

    def _pieces(self, node: int) -> tuple[Piece, ...]:
        """What a node forms in this micro-step."""
        expression = Expression(micro_batches=_OPEN, block=self._into.block)
        return expression.pieces(self._begin + rank for rank in self._live(node))

    def _exchange_inside(self, gradient: Tensor) -> None:
        group, topology = self._via.collectives, self._slices.topology
        node, _ = topology.place(group.rank)
        live, own = self._live(node), self._slices.slice_of(group.rank)
        held, wanted = {}, {}
        if group.rank in live:
            for rank in topology.ranks(node):
                theirs = self._slices.slice_of(rank)
                held[rank] = gradient[theirs.start : theirs.stop]
        for rank in live:
            wanted[rank] = (
                held[rank] if rank == group.rank else self._take(len(own), gradient.dtype)
            )
        self._of_node: Sequence[Tensor] = list(wanted.values())
        self._dtype = gradient.dtype
        self.pending = (group.exchange_pieces(held, wanted, self._what),)

    def _exchange_between(self) -> None:
        group, topology = self._via.collectives, self._slices.topology
        formed: list[tuple[Piece, Tensor]] = []
        if self._of_node:
            start = self._begin + topology.ranks(topology.place(group.rank)[0]).start
            formed = form_pieces(self._of_node, start, self._into.block, self._via.pool)
            given = {each.data_ptr() for each in self._of_node}
            self._taken += [each for _, each in formed if each.data_ptr() not in given]
        by_node = [self._pieces(node) for node in range(len(topology.nodes))]
        own, pending = self._slices.slice_of(group.rank), []
        self._arrived = []
        for turn in range(max(map(len, by_node))):
            held: dict[int, Tensor] = {}
            wanted: dict[int, Tensor] = {}
            if turn < len(formed):
                for owner, start, stop in self._slices.routes(group.rank):
                    held[owner] = formed[turn][1][start - own.start : stop - own.start]
            for pieces, sources in zip(by_node, self._slices.sources(group.rank), strict=True):
                if turn < len(pieces):
                    self._expect(pieces[turn], sources, held, wanted)
            pending.append(group.exchange_pieces(held, wanted, f"{self._what}, sums, {turn}"))
        self.pending = tuple(pending)

    def _expect(
        self,
        piece: Piece,
        sources: Sequence[tuple[int, int, int]],
        held: dict[int, Tensor],
        wanted: dict[int, Tensor],
    ) -> None:
        """Find the memory for this rank's shard of a piece, whose parts come from some ranks."""
        assert self._arrived is not None
        rank = self._via.collectives.rank
        if [source for source, _, _ in sources] == [rank]:
            self._arrived.append((piece, held[rank]))
            return
        shard = self._slices.shard_of(rank)
        whole = self._take(len(shard), torch.float32 if piece.level else self._dtype)
        for source, start, stop in sources:
            part = whole[start - shard.start : stop - shard.start]
            if source == rank:
                part.copy_(held[rank])
            else:
                wanted[source] = part
        self._arrived.append((piece, whole))
