"""The norms of the blocks of gradients of which each rank holds a shard."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.linalg import vector_norm

from zero_comm.exchange.collectives import Collectives, wait
from zero_step.division import Division, Positions, plan_norm
from zero_step.norm import BLOCK, block_norms

_WHAT = "parts of blocks for the norm"


class BlockNorms:
    """The norms of blocks, each by one rank."""

    def __init__(
        self, divisions: Sequence[Division], collectives: Collectives, device: torch.device
    ) -> None:
        """Plan who norms what; `collectives` says which rank has which shard."""
        self._divisions = tuple(divisions)
        self._device = device
        self._collectives = collectives
        self._exchanges = any(division.cuts for division in divisions)
        plan = plan_norm(divisions, collectives.owners, collectives.rank)
        self._shard = collectives.shards[collectives.rank]
        self._whole = plan.whole
        self._begins = plan.begins
        self._assembled = plan.assembled
        self._kept = _on(device, plan.kept)
        self._given = {rank: _on(device, given) for rank, given in plan.given.items()}
        self._places = {rank: torch.cat(at).to(device) for rank, at in plan.places.items()}

    def of(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """The norms of the blocks that this rank norms: for each tensor, then of assembled ones.

        Shards are flat and contiguous, also if they are empty.

        Raises:
            PeerLost: A peer is lost.
        """
        double = any(each.dtype == torch.float64 for each in shards)
        kind = torch.float64 if double else torch.float32
        found = []
        for shard, whole in zip(shards, self._whole, strict=True):
            found.append(vector_norm(shard[whole].to(kind).view(-1, BLOCK), dim=1))
        return [*found, self._of_assembled(shards, kind)]

    def _of_assembled(self, shards: Sequence[Tensor], kind: torch.dtype) -> Tensor:
        rank, places = self._collectives.rank, self._places
        given = {to: _taken(shards, each, kind) for to, each in self._given.items()}
        received = {
            source: torch.empty(at.numel(), dtype=kind, device=self._device)
            for source, at in places.items()
            if source != rank
        }
        if self._exchanges:
            wait(self._collectives.exchange_pieces(given, received, _WHAT))
        if self._kept:
            received[rank] = _taken(shards, self._kept, kind)
        blocks = torch.zeros(self._assembled * BLOCK, dtype=kind, device=self._device)
        for source, elements in received.items():
            blocks[places[source]] = elements
        return block_norms(blocks)

    def first_not_finite(self, norms: Sequence[Tensor]) -> tuple[int, int] | None:
        """The first block of this rank's that is not finite: its tensor, and its first element.

        `norms` is what `of` has returned.
        """
        *whole, assembled = (each.isfinite().logical_not().nonzero().flatten() for each in norms)
        found = []
        for number, (at, bad) in enumerate(zip(self._whole, whole, strict=True)):
            positions = at.start + bad.cpu() * BLOCK
            elements = self._divisions[number].elements_of(self._shard, positions)
            found += [(number, element) for element in elements[:1].tolist()]
        begins = [(number, each) for number, some in self._begins for each in some.tolist()]
        found += [begins[block] for block in assembled.tolist()]
        return min(found, default=None)


def _on(device: torch.device, positions: Positions) -> Positions:
    return [(number, each.to(device)) for number, each in positions]


def _taken(shards: Sequence[Tensor], positions: Positions, kind: torch.dtype) -> Tensor:
    return torch.cat([shards[number][at] for number, at in positions]).to(kind)
