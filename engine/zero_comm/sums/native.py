"""The reduction of the backend: its own reduce-scatter or all-reduce, for speed and no promise.

The bits depend on the backend, on the number of ranks and on how they are connected. `reduction` is
the ordered one, and the interface of both.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from zero_comm.exchange.collectives import Collectives, Pending, wait
from zero_comm.sums.buffer_pool import BufferPool
from zero_comm.sums.ordered_sum import OrderedSum
from zero_comm.sums.reduction import Reducing, Turn


class NativeReduction:
    """A reduce-scatter, or an all-reduce, by the backend; see `OrderedReduction`."""

    def __init__(
        self, collectives: Collectives, pool: BufferPool, dtype: torch.dtype = torch.float32
    ) -> None:
        """Reduce over a group in which nothing else is exchanged.

        Its shards are in the order of ranks. Gradients travel, and are added to those of other
        ranks, in `dtype`.
        """
        self.collectives = collectives
        self.pool = pool
        self.dtype = dtype
        self.own = WeakKeyDictionary[OrderedSum, Tensor]()
        """The sum of this rank's micro-batches of the step so far, [world * n] in fp32."""

    def start(self, gradient: Tensor, what: str, into: OrderedSum, turn: Turn) -> Reducing:
        """See `OrderedReduction.start`.

        Nothing is pending if nothing travels in this micro-step.

        If `into` is as long as the gradient, every rank gets all.
        """
        # What a padding micro-batch gives does not count, and the backend adds what every rank
        # hands over.
        if self.collectives.rank >= turn.live:
            gradient.zero_()
        if turn.first:
            self.own.pop(into, None)
        if turn.withholds and turn.first:
            # Where every rank gets the whole sum, it is made where the sum is going to be.
            whole = into.total.numel() == gradient.numel()
            self.own[into] = (
                into.total if whole else torch.empty_like(gradient, dtype=torch.float32)
            )
            if self.own[into].data_ptr() != gradient.data_ptr():
                self.own[into].copy_(gradient)
        elif into in self.own:
            self.own[into].add_(gradient)
        if turn.withholds:
            return _Withheld()
        return _Handed(self, self.own.pop(into, None), gradient, what, into, turn)


class _Withheld(Reducing):
    """The gradients of a micro-step after which nothing travels."""

    pending = ()

    def advance(self) -> bool:
        """See `Reducing`."""
        return False


class _Handed(Reducing):
    """The gradients of one micro-step, or of all so far, in the hands of the backend."""

    def __init__(
        self,
        via: NativeReduction,
        own: Tensor | None,
        gradient: Tensor,
        what: str,
        into: OrderedSum,
        turn: Turn,
    ) -> None:
        self._via = via
        self._into = into
        self._last = turn.last
        self._first = turn.first or own is not None
        """Whether nothing has been handed over in this step."""
        self._taken: list[Tensor] = []
        group, value = via.collectives, gradient if own is None else own
        everywhere = into.total.numel() == value.numel()
        sent = value
        if value.dtype != via.dtype:
            sent = self._memory(value.numel(), fits=everywhere).copy_(value)
        if group.world == 1:
            self._sum, pending = sent, Pending(what)
        elif everywhere:
            self._sum, pending = sent, group.all_reduce(sent, what)
        else:
            self._sum = self._memory(into.total.numel(), fits=True)
            pending = group.reduce_scatter(sent, self._sum, what)
        self.pending = (pending,)

    def advance(self) -> bool:
        """See `Reducing`."""
        wait(self.pending[0])
        self._into.add([self._sum], self._via.pool, first=self._first, last=self._last)
        while self._taken:
            self._via.pool.give(self._taken.pop())
        return False

    def _memory(self, numel: int, *, fits: bool) -> Tensor:
        """Memory for a sum; where it is going to be, if it `fits` and nothing is there yet."""
        total = self._into.total
        if fits and self._first and total.dtype == self._via.dtype:
            return total
        self._taken.append(self._via.pool.take(numel, self._via.dtype))
        return self._taken[-1]
