"""The reduction of the backend: its own reduce-scatter or all-reduce, for speed and no promise.

Owns what is handed to the backend, and in which dtype. Must always hold: what padding micro-batches
give does not count; nothing else is exchanged in the group, so all ranks begin the same sums in the
same order. The bits depend on the backend, on the number of ranks and on how they are connected.

`reduction` is the ordered one, and the interface of both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero_comm.buffer_pool import BufferPool
from zero_comm.collectives import Collectives, Pending, wait
from zero_comm.ordered_sum import OrderedSum
from zero_comm.reduction import Reducing, Turn


class NativeReduction:
    """A reduce-scatter, or an all-reduce, by the backend; see `OrderedReduction`."""

    steps = 1

    def __init__(
        self, collectives: Collectives, pool: BufferPool, dtype: torch.dtype = torch.float32
    ) -> None:
        """Reduce over a group.

        Args:
            collectives: The group; its shards are in the order of ranks, and nothing else is
                exchanged in it.
            pool: Of what is sent and received.
            dtype: In which gradients travel and are added to those of other ranks.
        """
        self.collectives = collectives
        self.pool = pool
        self.dtype = dtype

    def start(self, gradient: Tensor, what: str, into: OrderedSum, turn: Turn) -> Reducing:
        """As `OrderedReduction.start`; if `into` is as long as the gradient, every rank gets all.

        Args:
            gradient: [world * n].
            what: Names the exchange in messages.
            into: The sum of the step, of n elements or of all.
            turn: Which micro-step it is.
        """
        return _Handed(self, gradient, what, into, turn)


class _Handed(Reducing):
    """The gradients of one micro-step, in the hands of the backend."""

    def __init__(
        self, via: NativeReduction, gradient: Tensor, what: str, into: OrderedSum, turn: Turn
    ) -> None:
        self._via = via
        self._into = into
        self._turn = turn
        self._taken: list[Tensor] = []
        group = via.collectives
        if group.rank >= turn.live:
            gradient.zero_()
        everywhere = into.total.numel() == gradient.numel()
        sent = gradient
        if gradient.dtype != via.dtype:
            sent = self._memory(gradient.numel(), fits=everywhere).copy_(gradient)
        if group.world == 1:
            self._sum, pending = sent, Pending(what)
        elif everywhere:
            self._sum, pending = sent, group.all_reduce(sent, what)
        else:
            self._sum = self._memory(into.total.numel(), fits=True)
            pending = group.reduce_scatter(sent, self._sum, what)
        self.pending = (pending,)

    def advance(self) -> bool:
        """As in `Reducing`."""
        wait(self.pending[0])
        self._into.add([self._sum], self._via.pool, first=self._turn.first, last=self._turn.last)
        while self._taken:
            self._via.pool.give(self._taken.pop())
        return False

    def _memory(self, numel: int, *, fits: bool) -> Tensor:
        """Memory for a sum; where it is going to be, if it `fits` and nothing is there yet."""
        total = self._into.total
        if fits and self._turn.first and total.dtype == self._via.dtype:
            return total
        self._taken.append(self._via.pool.take(numel, self._via.dtype))
        return self._taken[-1]
