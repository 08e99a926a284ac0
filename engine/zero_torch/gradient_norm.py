"""The norm of all gradients, with bits that depend neither on shards nor on the world size.

Must always hold: the norm is that of blocks of NORM_BLOCK elements of each parameter, in the order
of the parameters. FSDP2 gives a rank rows of a parameter, so a rank first sends the elements that
lie in blocks of other ranks to those: `crossings` decides which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zero_comm.collectives import Collectives, wait
from zero_comm.reduction import NORM_BLOCK, BlockNorm, block_norms, squared_norm

_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


class Crossing(NamedTuple):
    """Elements [start, stop) of a tensor that one rank holds, and another one (or it) norms."""

    tensor: int
    holder: int
    target: int
    start: int
    stop: int


def share_of(length: int, world: int) -> int:
    """How many elements of a tensor each rank norms: whole blocks."""
    return -(-length // (NORM_BLOCK * world)) * NORM_BLOCK


def row_bounds(shape: Sequence[int], world: int) -> list[int]:
    """Where the rows of each rank begin in the flattened tensor, and where the last ones end.

    As torch.chunk, and so FSDP2, divides the first dimension.
    """
    rows = shape[0]
    width = torch.Size(shape[1:]).numel()
    chunk = -(-rows // world)
    return [min(rank * chunk, rows) * width for rank in range(world + 1)]


def crossings(bounds: Sequence[Sequence[int]], world: int) -> list[Crossing]:
    """Who norms which elements of the shards.

    Args:
        bounds: For each tensor, where the shard of each rank begins, and where the last one ends.
        world: Ranks.
    """
    found = []
    for tensor, begins in enumerate(bounds):
        share = share_of(begins[-1], world)
        for holder in range(world):
            at, end = begins[holder], begins[holder + 1]
            while at < end:
                target = at // share
                stop = min(end, (target + 1) * share)
                found.append(Crossing(tensor, holder, target, at, stop))
                at = stop
    return found


Norm = Callable[[Sequence[Tensor], Tensor], tuple[float, Tensor]]
"""From flat gradients, and this rank's notes [n] in fp32, to the norm and the notes of all ranks
[world, n], on the CPU: one exchange for both."""


def _kind_of(gradients: Sequence[Tensor]) -> torch.dtype:
    """The dtype of their norm: fp64 if one of them has it."""
    is_double = any(each.dtype == torch.float64 for each in gradients)
    return torch.float64 if is_double else torch.float32


class ShardNorm:
    """The norm of tensors of which each rank holds some consecutive elements: a `Norm`."""

    def __init__(
        self, bounds: Sequence[Sequence[int]], collectives: Collectives, device: torch.device
    ) -> None:
        """Describe the tensors.

        Args:
            bounds: See `crossings`.
            collectives: The exchanges of the group.
            device: The device of the gradients.
        """
        self._group = collectives
        self._bounds = bounds
        rank, world = collectives.rank, collectives.world
        self._shares = [share_of(each[-1], world) for each in bounds]
        lengths = [each[-1] for each in bounds]
        self._norm = BlockNorm(lengths, self._shares, range(world), device)
        every = crossings(bounds, world)
        self._given = [each for each in every if each.holder == rank]
        self._taken = [each for each in every if each.target == rank]

    def __call__(self, shards: Sequence[Tensor], notes: Tensor) -> tuple[float, Tensor]:
        """See `Norm`. Collective.

        Raises:
            PeerLost: A peer is lost.
        """
        rank = self._group.rank
        kind = _kind_of(shards)
        rows = [
            shard.new_zeros(share, dtype=kind)
            for shard, share in zip(shards, self._shares, strict=True)
        ]
        held: dict[int, list[Tensor]] = {}
        for tensor, _, target, start, stop in self._given:
            begin = self._bounds[tensor][rank]
            held.setdefault(target, []).append(
                shards[tensor][start - begin : stop - begin].to(kind)
            )
        sizes: dict[int, int] = {}
        for _, holder, _, start, stop in self._taken:
            sizes[holder] = sizes.get(holder, 0) + stop - start
        sent = {target: torch.cat(each) for target, each in held.items()}
        received = {
            holder: rows[0].new_empty(size) for holder, size in sizes.items() if holder != rank
        }
        wait(self._group.exchange_pieces(sent, received, "gradients for the norm"))
        if rank in sent:
            received[rank] = sent[rank]
        read = dict.fromkeys(received, 0)
        for tensor, holder, _, start, stop in self._taken:
            begin, size, at = rank * self._shares[tensor], stop - start, read[holder]
            rows[tensor][start - begin : stop - begin] = received[holder][at : at + size]
            read[holder] += size
        return _exchanged(self._group, self._norm, self._norm.of_own(rows), notes)


class WholeNorm:
    """The same norm of tensors that every rank has whole, each for its share of them: a `Norm`."""

    def __init__(
        self, lengths: Sequence[int], collectives: Collectives, device: torch.device
    ) -> None:
        """Describe the tensors: their lengths, in their order."""
        self._group = collectives
        world = collectives.world
        self._shares = [share_of(length, world) for length in lengths]
        self._norm = BlockNorm(lengths, self._shares, range(world), device)

    def __call__(self, gradients: Sequence[Tensor], notes: Tensor) -> tuple[float, Tensor]:
        """See `Norm`. Collective.

        Raises:
            PeerLost: A peer is lost.
        """
        own, kind = [], _kind_of(gradients)
        for gradient, share in zip(gradients, self._shares, strict=True):
            begin = self._group.rank * share
            norms = block_norms(gradient[begin : begin + share].to(kind))
            own += [norms, norms.new_zeros(share // NORM_BLOCK - norms.numel())]
        return _exchanged(self._group, self._norm, torch.cat(own), notes)


def _exchanged(
    group: Collectives, norm: BlockNorm, own: Tensor, notes: Tensor
) -> tuple[float, Tensor]:
    """The norm, from that of this rank's blocks, and everybody's notes."""
    blocks = own.numel()
    told = group.numbers([group.order.checksum(), *notes.tolist()], own.device)
    everybodys = group.everybodys(torch.cat([own, told]), "gradient norms")
    ordered = norm.in_order(everybodys[:, :blocks].contiguous())
    # The host waits here, once in a step, and for a few numbers.
    small = torch.cat([squared_norm(ordered).view(1), everybodys[:, blocks:].double().flatten()])
    known = group.to_host(small, "gradient norms")
    rows = known[1:].view(everybodys.shape[0], -1)
    group.check_order(rows[:, 0].tolist())
    return math.sqrt(float(known[0])), rows[:, 1:].to(everybodys.dtype)


def clip(gradients: Sequence[Tensor], norm: float, max_norm: float) -> None:
    """Scale gradients of this norm down to `max_norm`, as torch.nn.utils.clip_grad_norm_ does."""
    factor = max_norm / (norm + _EPSILON)
    if factor < 1:
        torch._foreach_mul_(list(gradients), factor)
