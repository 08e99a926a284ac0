"""The ordered reduction: sums that depend on micro-batches, never on who computed them.

Owns the order of every addition that crosses ranks or micro-steps. It knows flat tensors and ranks
alone. `zero_step.gradients.pipeline` reduces with it. `node` does the same sums inside of nodes
first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from zero_comm.exchange.collectives import Collectives, Pending, wait
from zero_comm.sums.buffer_pool import BufferPool
from zero_comm.sums.ordered_sum import OrderedSum
from zero_comm.sums.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Position of a micro-step within the sum of a training step."""

    live: int
    """Ranks [0, live) have run micro-batches, the others padding ones."""
    first: bool
    """It is the first one of a step."""
    last: bool = False
    """It is the last one, as far as anybody knows."""
    plan: Plan | None = None
    """Who forms which pieces in the step; None: micro-batches go from rank to rank, and the pieces
    of several micro-steps are added by owners."""
    micro_step: int = 0
    """Its number in the plan."""
    silent: bool = False
    """The gradient of this rank counts as zero, whatever it is."""
    accumulates: bool = False
    """Ranks add up what they have, and the backend makes one sum in the last micro-step."""

    @property
    def withholds(self) -> bool:
        """Whether ranks hold, after it, what has not come to the owners of the sum."""
        return (self.accumulates or self.plan is not None) and not self.last


class Reducing(ABC):
    """The gradients of one micro-step, on their way to the owners of their sums."""

    pending: tuple[Pending, ...]
    """The exchanges under way."""
    holds_gradient = True
    """Whether the gradient that was given is still needed; its memory can be used again if not."""

    @abstractmethod
    def advance(self) -> bool:
        """Wait for the exchanges under way, then begin the next ones, or add what has come.

        False if it has been added: this was the last step.

        Raises:
            PeerLost: A peer is gone, or has not answered within the group's timeout.
            LeavingNow: This rank was asked to leave.
            Diverged: The ranks wait for each other.
        """

    def finish(self) -> None:
        """All steps that are left; raises what `advance` raises."""
        while self.advance():
            pass


class OrderedReduction:
    """A reduce-scatter whose sums do not depend on the world size.

    At micro-step s, rank r of W runs micro-batch s * W + r. Its intervals are sent to their owners,
    who add what has come.
    """

    def __init__(self, collectives: Collectives, pool: BufferPool) -> None:
        """Reduce over a group, whose shards are in the order of ranks."""
        self.collectives = collectives
        self.pool = pool

    def start(self, gradient: Tensor, what: str, into: OrderedSum, turn: Turn) -> Reducing:
        """Send the gradient of one micro-batch; all ranks in the same order.

        The gradient [world * n] is to be left alone while it `holds_gradient` and until the sum is
        made, which uses it up. `what` names the exchanges in messages.

        Raises:
            PeerLost: A peer is gone.
        """
        world = self.collectives.world
        received = self.pool.take(gradient.numel() // world * (world - 1), gradient.dtype)
        pending = Pending(what)
        if world > 1:
            pending = self.collectives.exchange_gradients(gradient, received, what)
        return _Flat(self, gradient, received, into, turn, pending)


class _Flat(Reducing):
    def __init__(
        self,
        via: OrderedReduction,
        sent: Tensor,
        received: Tensor,
        into: OrderedSum,
        turn: Turn,
        pending: Pending,
    ) -> None:
        self._via = via
        self._sent = sent
        self._received = received
        self._into = into
        self._turn = turn
        self.pending = (pending,)

    def advance(self) -> bool:
        """See `Reducing`."""
        via, turn = self._via, self._turn
        wait(self.pending[0])
        gradients = via.collectives.in_microbatch_order(self._sent, self._received)
        # What padding micro-batches give is received and not added.
        self._into.add(gradients[: turn.live], via.pool, first=turn.first, last=turn.last)
        via.pool.give(self._received)
        return False
