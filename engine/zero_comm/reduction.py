"""The ordered reduction: sums and norms that depend on micro-batches, never on who computed them.

Owns the order of every addition that crosses ranks or micro-steps. Must always hold:

- The owner of an interval receives the gradients of micro-batches in the order of their numbers
  and adds them as `ordered_sum` says, in fp32. What padding micro-batches give is received and not
  added.
- A norm is taken over blocks of NORM_BLOCK elements, and the blocks are summed in the order of the
  tensors, in fp64, so it does not depend on the world size either.

It knows flat tensors and ranks alone. `grad_reducer` reduces units with it, `zero_optimizer` takes
the norm of what they come to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import vector_norm

from zero_comm.buffer_pool import BufferPool
from zero_comm.collectives import Collectives, Pending, wait
from zero_comm.ordered_sum import OrderedSum
from zero_comm.quantization import pack, packed_size

NORM_BLOCK = 1024
"""Elements; the interval of each rank begins on a multiple of it."""


# ---- sums ----


@dataclass(frozen=True, slots=True)
class Reduction:
    """The gradients of one micro-step, on their way to the owners of their sums."""

    pending: Pending
    sent: Tensor
    received: Tensor


class OrderedReduction:
    """A reduce-scatter whose sums do not depend on the world size.

    At micro-step s, rank r of W runs micro-batch s * W + r. `start` sends the intervals of its
    gradient to their owners; `finish` adds what has come to the sum of this rank's own interval.
    """

    def __init__(
        self, collectives: Collectives, pool: BufferPool, *, quantized: bool = False
    ) -> None:
        """Reduce over a group.

        Args:
            collectives: The group.
            pool: Of what is received.
            quantized: Gradients travel as int8.
        """
        self._collectives = collectives
        self._pool = pool
        self._quantized = quantized

    def start(self, gradient: Tensor, what: str) -> Reduction:
        """Send the gradient of one micro-batch, [world * n]; all ranks in the same order.

        It must stay as it is until `finish`, which uses it up. Raises PeerLost.
        """
        world = self._collectives.world
        if self._quantized:  # at world 1 as well: one result
            rows = gradient.view(world, -1)
            gradient = self._pool.take(world * packed_size(rows.shape[1]), torch.uint8)
            pack(rows, gradient.view(world, -1))
        received = self._pool.take(gradient.numel() // world * (world - 1), gradient.dtype)
        if world == 1:
            return Reduction(Pending(what), gradient, received)
        pending = self._collectives.exchange_gradients(gradient, received, what)
        return Reduction(pending, gradient, received)

    def finish(
        self,
        reduction: Reduction,
        into: OrderedSum,
        *,
        live: int,
        first: bool,
        last: bool = False,
    ) -> None:
        """Wait for everybody's gradients of this rank's interval and add them up.

        Args:
            reduction: What `start` has begun.
            into: The sum of the step, of n elements.
            live: Ranks [0, live) have run micro-batches, the others padding ones.
            first: It is the first micro-step of a step.
            last: It is the last one, as far as anybody knows.

        Raises:
            PeerLost: A peer is gone, or has not answered within the group's timeout.
            LeavingNow: This rank was asked to leave.
            Diverged: The ranks wait for each other.
        """
        wait(reduction.pending)
        gradients = self._collectives.in_microbatch_order(reduction.sent, reduction.received)
        into.add(gradients[:live], self._pool, first=first, last=last, packed=self._quantized)
        self._pool.give(reduction.received)
        if self._quantized:
            self._pool.give(reduction.sent)


# ---- norms ----


class BlockNorm:
    """The norm of flat tensors of which each rank holds an interval.

    Each rank takes the norms of its blocks (`of_own`); one all-gather makes a table of them, of
    which every rank computes the same norm.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        shares: Sequence[int],
        owners: Sequence[int],
        device: torch.device,
    ) -> None:
        """Describe the tensors.

        Args:
            lengths: Of each tensor, without the padding at its end.
            shares: Elements of it that each rank holds; a multiple of NORM_BLOCK.
            owners: By shard, the rank that holds it.
            device: Of the table.
        """
        self._blocks = [-(-length // NORM_BLOCK) for length in lengths]
        # Where the norm of each block lies in the table [world * blocks]. Every rank contributes
        # one row: its blocks of the first tensor, of the second, and so on. Blocks of the padding
        # are left out, so the list is the same at every world size.
        per_rank = sum(shares) // NORM_BLOCK
        order, column = [], 0
        for count, share in zip(self._blocks, shares, strict=True):
            columns = torch.arange(column, column + share // NORM_BLOCK)
            places = torch.tensor(owners)[:, None] * per_rank + columns
            order.append(places.flatten()[:count])
            column += share // NORM_BLOCK
        self._order = torch.cat(order).to(device)

    def of_own(self, shares: Sequence[Tensor]) -> Tensor:
        """The norms of this rank's blocks, tensor after tensor: one row of the table."""
        return torch.cat([vector_norm(share.view(-1, NORM_BLOCK), dim=1) for share in shares])

    def in_order(self, table: Tensor) -> Tensor:
        """The norms of all blocks in the order of the tensors, from everybody's [world, blocks]."""
        return table.flatten()[self._order]

    def first_not_finite(self, ordered: Tensor) -> tuple[int, int]:
        """Which tensor, and which element of it, the first block begins at that is not finite."""
        block = int(torch.argmin(torch.isfinite(ordered).int()))
        for number, blocks in enumerate(self._blocks):
            if block < blocks:
                return number, block * NORM_BLOCK
            block -= blocks
        raise AssertionError("a block beyond the last tensor")


def total_norm(ordered: Tensor) -> float:
    """The norm of everything, from the norms of its blocks in their order."""
    return math.sqrt(float(ordered.double().square().sum()))
