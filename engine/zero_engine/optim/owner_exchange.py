"""Whole parameters, each on one rank for a moment, from the pieces that all ranks hold, and back.

They go round in *exchange groups* of one per rank, in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_comm.exchange.collectives import Collectives, Pending
from zero_engine.sharding.flat_unit import FlatUnit, Slot, overlap


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """One whole parameter, or what is laid out like it, of which each rank holds a piece."""

    unit: FlatUnit
    slot: Slot
    mine: Tensor
    """This rank's piece: a view, [its elements]."""

    @property
    def divided(self) -> bool:
        """Whether no rank holds all of its unit."""
        return self.unit.master.numel() != self.unit.padded

    def piece(self, rank: int) -> slice:
        """The elements of the parameter that a rank holds, possibly none."""
        held = self.unit.interval_of(rank) if self.divided else (0, self.unit.padded)
        start, stop = overlap(self.slot.start, self.slot.stop, *held)
        return slice(start - self.slot.start, stop - self.slot.start)


ExchangeGroup = Sequence[Shared]
"""One parameter for each rank, its owner; the last exchange group may be smaller."""


def in_exchange_groups(shared: Iterable[Shared], world: int) -> list[ExchangeGroup]:
    """Sort into exchange groups, largest first, so that the members of a group take as long."""
    found = sorted(shared, key=lambda each: -each.slot.numel)
    return [found[begin : begin + world] for begin in range(0, len(found), world)]


class OwnerExchange:
    """Brings the parameters of an exchange group to their owners, and back to all ranks."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._rank = collectives.rank

    def owned(self, exchange_group: ExchangeGroup) -> Shared | None:
        """The parameter of an exchange group that this rank owns, if any."""
        return exchange_group[self._rank] if self._rank < len(exchange_group) else None

    def collect(self, exchange_group: ExchangeGroup, what: str) -> tuple[Tensor, Pending]:
        """Begin to bring the pieces of each parameter to its owner: this rank's, and the wait."""
        owned = self.owned(exchange_group)
        whole, wanted = torch.empty(0, device="cpu"), {}
        # Where every rank holds all of a unit, the owner has what it needs.
        held = {owner: shared.mine for owner, shared in enumerate(exchange_group) if shared.divided}
        if owned is not None:
            # Contiguous, in memory of its own: the bits of a result depend neither on the rank that
            # computes it nor on the division.
            whole = owned.mine.new_empty(owned.slot.numel)
            whole[owned.piece(self._rank)] = owned.mine
            wanted = self._pieces(owned, whole) if owned.divided else {}
        return whole, self._collectives.exchange_pieces(held, wanted, what)

    def give_back(self, exchange_group: ExchangeGroup, whole: Tensor, what: str) -> Pending:
        """Begin to send the pieces of whole parameters to the ranks that hold them."""
        owned = self.owned(exchange_group)
        if owned is not None:
            owned.mine.copy_(whole[owned.piece(self._rank)])
        wanted = {owner: shared.mine for owner, shared in enumerate(exchange_group)}
        if not exchange_group[0].divided:  # every rank gets all
            return self._collectives.share(wanted, what)
        held = {} if owned is None else self._pieces(owned, whole)
        return self._collectives.exchange_pieces(held, wanted, what)

    def _pieces(self, shared: Shared, whole: Tensor) -> dict[int, Tensor]:
        return {rank: whole[shared.piece(rank)] for rank in range(self._collectives.world)}
