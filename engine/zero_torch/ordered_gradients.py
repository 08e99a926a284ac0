"""The gradients of one step: those of micro-batches come in, their ordered sum goes out.

Owns the sums of a step, by name, and where in a step this rank is. Must always hold: every sum
receives every micro-batch of the step, in the order of their numbers, so the sum depends on the
micro-batches alone; what torch accumulates into `.grad` is zeros until the last micro-step, and
then the sum.

`hooks_fsdp2`, `hooks_ddp` and `hooks_plain` bring torch's gradients here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zero_comm.buffer_pool import BufferPool
from zero_comm.collectives import Collectives, wait
from zero_comm.ordered_sum import OrderedSum
from zero_contract.errors import ZeroError


class Interval(NamedTuple):
    """The elements of one named sum that each rank owns."""

    name: str
    numel: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroStep:
    """Where in a step this rank is."""

    number: int
    live: int
    """Ranks [0, live) run micro-batches, the others padding micro-batches, which are not summed."""
    last: bool
    weight: float
    """The share of this rank's micro-batch in the mean loss of the step."""


class OrderedGradients:
    """The sums of all gradients of a model.

    Attributes:
        now: The micro-step; None between the end of a step and the next micro-batch.
        block: Micro-batches that are summed in a tree; it may change between two steps.
        loss_is_weighted: Whether the loss of this backward has the weight of its micro-batch
            already; otherwise the gradients get it here.
        failure: What a reduction has raised: autograd may pass it on as another error.
    """

    def __init__(self, collectives: Collectives, device: torch.device, block: int) -> None:
        """Sum over a group, in blocks of `block` micro-batches."""
        self.now: MicroStep | None = None
        self.loss_is_weighted = False
        self.failure: Exception | None = None
        self._collectives = collectives
        self._pool = BufferPool(device)
        self.block = block
        self._sums: dict[str, OrderedSum] = {}
        self._received: set[str] = set()

    def begin(self, now: MicroStep) -> None:
        """Begin a micro-step."""
        if now.number == 0:
            self._sums.clear()
        self._received.clear()
        self.now = now

    def end(self) -> None:
        """End the micro-step.

        Raises:
            ZeroError: There was no backward in it, or some parameters got no gradient in it.
        """
        assert self.now is not None
        if not self._received:
            raise ZeroError(
                f"no gradient was reduced in micro-step {self.now.number}: call run.backward(loss) "
                "once for each batch of run.loader, and not within no_sync()"
            )
        if absent := sorted(self._sums.keys() - self._received):
            raise ZeroError(
                f"{absent[0]} got no gradient in micro-step {self.now.number} and had one before: "
                "every micro-batch must use the same parameters; let the others contribute "
                "0 * parameter.sum() to the loss"
            )
        self.now = None

    def reduce(self, intervals: Sequence[Interval], gradient: Tensor, out: Tensor) -> None:
        """Add the gradient of this rank's micro-batch, and those of the other ranks. Collective.

        Args:
            intervals: What each rank owns of the gradient, in this order.
            gradient: [world * n], n elements for each rank; used up.
            out: [n]; filled with zeros, or in the last micro-step with the sums; may be the memory
                of `gradient` at world 1.

        Raises:
            ZeroError: There is no micro-step, or a gradient of one comes a second time.
            PeerLost: A peer is lost.
        """
        try:
            self._reduce(intervals, gradient, out)
        except Exception as error:
            self.failure = error
            raise

    def _reduce(self, intervals: Sequence[Interval], gradient: Tensor, out: Tensor) -> None:
        now = self._expect(intervals)
        if not self.loss_is_weighted:
            gradient.mul_(now.weight)
        group, world = self._collectives, self._collectives.world
        received = self._pool.take(gradient.numel() // world * (world - 1), gradient.dtype)
        if world > 1:
            what = f"gradients of {intervals[0].name}"
            wait(group.exchange_gradients(gradient, received, what))
        microbatches = group.in_microbatch_order(gradient, received)[: now.live]
        begin = 0
        for name, numel in intervals:
            own = [each[begin : begin + numel] for each in microbatches]
            self._add(name, own, out[begin : begin + numel], now)
            begin += numel
        self._pool.give(received)

    def _add(self, name: str, microbatches: list[Tensor], out: Tensor, now: MicroStep) -> None:
        first = name not in self._sums
        if first:
            total = torch.empty_like(microbatches[0], dtype=torch.float32)
            self._sums[name] = OrderedSum(total, self.block)
        ordered = self._sums[name]
        ordered.add(microbatches, self._pool, first=first, last=now.last)
        if not now.last:
            out.zero_()
            return
        ordered.settle()
        # torch adds the sum to zeros, unless the step has one micro-step: -0 + 0 is +0.
        out.copy_(ordered.total.add_(0.0))

    def _expect(self, intervals: Sequence[Interval]) -> MicroStep:
        if self.now is None:
            raise ZeroError(
                "a backward() outside of a micro-batch: its gradients belong to no step; call it "
                "once for each batch of run.loader"
            )
        for name, _ in intervals:
            if name in self._received:
                raise ZeroError(
                    f"{name} got a second gradient in micro-step {self.now.number}: call "
                    "backward() once for each batch of run.loader, with the sum of its losses"
                )
            if self.now.number and name not in self._sums:
                raise ZeroError(
                    f"{name} got no gradient in the micro-steps before {self.now.number}: every "
                    "micro-batch must use the same parameters; let the others contribute "
                    "0 * parameter.sum() to the loss"
                )
            self._received.add(name)
        return self.now
