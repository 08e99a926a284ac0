"""The pipeline of reductions: gradients of micro-batches come in, their ordered sums go out.

Owns the reductions that are under way, and how far each has come. Must always hold:

- All ranks begin the same reductions in the same order, and none overtakes the one before it. So
  the exchanges of one kind begin in one order on all ranks.
- Each of its exchanges has a bounded number of them, if this rank can be kept waiting where it is
  called.
- What has ended is gone on with when the next gradient comes, or at `poll`, and not before.

Hooks feed it: of flat units (`zero_engine`), of DDP, FSDP2 and plain modules (`zero_torch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import inf

import torch
from torch import Tensor

from zero_comm.exchange.collectives import Collectives, Pending, has_ended, wait
from zero_comm.sums.buffer_pool import BufferPool
from zero_comm.sums.native import NativeReduction
from zero_comm.sums.node import NodeReduction, apart
from zero_comm.sums.ordered_sum import OrderedSum
from zero_comm.sums.reduction import OrderedReduction, Turn
from zero_comm.waiting import Interrupt

Reduction = OrderedReduction | NodeReduction | NativeReduction


def reduction_over(
    collectives: Collectives,
    device: torch.device,
    interrupt: Interrupt,
    *,
    alone: bool,
    two: bool,
    native: torch.dtype | None = None,
) -> Reduction:
    """The reduction: by the backend in the dtype `native`, by nodes, or by owners. Collective.

    Exchanges that travel at the same time need a group each where they are matched by their order:
    something else does (`alone`), or a sum has `two` of them, inside of nodes and between them.
    """
    pool, own = BufferPool(device), partial(apart, collectives, device, interrupt)
    if two:
        inside = own()
        return NodeReduction(inside, inside if collectives.any_order(device) else own(), pool)
    group = own() if alone and collectives.world > 1 else collectives
    return OrderedReduction(group, pool) if native is None else NativeReduction(group, pool, native)


def by_stream(reduction: Reduction) -> bool:
    """Whether a device's stream does the waiting, so that the host waits for no other rank."""
    return not reduction.collectives.any_order(reduction.pool.device)


@dataclass(slots=True, eq=False)
class UnderWay:
    """A reduction that has begun and has not ended."""

    steps: Iterator[tuple[Pending, ...]]
    """Each waits for the exchanges that the one before has begun, and begins others."""
    pending: tuple[Pending, ...]
    """The exchanges under way."""
    number: int = 1
    """Of the exchange that it has come to: the first, the second, ..."""

    def has_arrived(self) -> bool:
        """Whether the next step would not wait."""
        return all(map(has_ended, self.pending))


class Pipeline:
    """The reductions of one rank.

    Attributes:
        turn: The micro-step.
        weight: The factor of its gradients; 1 if their loss has been multiplied with it.
        under_way: In the order in which they have begun.
    """

    def __init__(self, reduction: Reduction, *, depth: float, at_once: bool = False) -> None:
        """Reduce the gradients of micro-steps.

        Args:
            reduction: Makes the sums.
            depth: How many may have come to the same exchange; more of them wait in `reduce`.
                Without a bound where another rank may be kept waiting for what this one does after
                that: for the weights that it gathers, say.
            at_once: Keep none under way.
        """
        self.reduction = reduction
        self.turn = Turn(live=0, first=True)
        self.weight = 1.0
        self.under_way: list[UnderWay] = []
        self._depth = depth
        self._at_once = at_once or reduction.collectives.world == 1

    @property
    def pool(self) -> BufferPool:
        """The memory of gradients, and of what is received."""
        return self.reduction.pool

    def begin(self, turn: Turn, weight: float = 1.0) -> None:
        """Begin a micro-step."""
        self.turn, self.weight = turn, weight

    def weigh(self, gradient: Tensor) -> None:
        """Give a gradient of this rank its weight, in place."""
        if self.turn.silent:  # it may be infinite
            gradient.zero_()
        elif self.weight != 1:
            gradient.mul_(self.weight)

    def reduce(
        self,
        gradient: Tensor,
        what: str,
        into: OrderedSum,
        *,
        lent: bool = False,
        then: Callable[[], Pending | None] | None = None,
    ) -> None:
        """Begin to add the gradients of the micro-batches of all ranks. Collective.

        The gradient [world * n] is used up, and goes back to the pool if it is `lent`; the sum is
        of n elements, or of all if the backend makes it. `then` is called when the micro-step has
        been added, and may begin an exchange, as of the sums.

        Raises:
            PeerLost: A peer is gone, or has not answered within the group's timeout.
            LeavingNow: This rank was asked to leave.
            Diverged: The ranks wait for each other.
        """
        self.poll()
        # More of them would take memory and save no time: the network is busy with these.
        while not self._has_room(1):
            self._wait()
        self.weigh(gradient)
        steps = self._steps(gradient, what, into, lent, then)
        pending = next(steps, None)
        while pending is not None and not pending:  # nothing travels in this micro-step
            pending = next(steps, None)
        if pending is not None:
            self.under_way.append(UnderWay(steps, pending))
        if self._at_once:
            self.complete()

    def poll(self) -> bool:
        """Do the next step of each reduction whose exchanges have ended; whether there was one."""
        moved, ahead = False, inf  # `ahead`: the exchange that the reduction before has come to
        for each in tuple(self.under_way):
            if each.number < ahead and self._has_room(each.number + 1) and each.has_arrived():
                self._step(each)
                moved = True
            ahead = each.number
        return moved

    def _has_room(self, exchange: int) -> bool:
        return sum(each.number == exchange for each in self.under_way) < self._depth

    def end(self) -> None:
        """End a backward: wait for everything, and free what the next forward needs."""
        self.complete()
        self.pool.free()

    def complete(self) -> None:
        """Wait for everything that is under way."""
        while self.under_way:
            self._wait()

    def _wait(self) -> None:
        """Do the steps that can be done, or else wait for the one that began first."""
        if not self.poll():
            self._step(self.under_way[0])

    def _step(self, each: UnderWay) -> None:
        pending = next(each.steps, None)
        if pending is None:
            self.under_way.remove(each)
        else:
            each.pending, each.number = pending, each.number + 1

    def _steps(
        self,
        gradient: Tensor,
        what: str,
        into: OrderedSum,
        lent: bool,
        then: Callable[[], Pending | None] | None,
    ) -> Iterator[tuple[Pending, ...]]:
        reducing = self.reduction.start(gradient, what, into, self.turn)
        yield reducing.pending
        goes_on = True
        while goes_on:
            goes_on = reducing.advance()
            # Given back as soon as nothing under way reads it: the next gradient may be there.
            if lent and not (goes_on and reducing.holds_gradient):
                self.pool.give(gradient)
                lent = False
            if goes_on:
                yield reducing.pending
        if then is not None and (pending := then()) is not None:
            yield (pending,)
            wait(pending)
