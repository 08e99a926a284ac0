"""Changes of whole parameters, each on one rank for a moment, from the pieces that all ranks hold.

Must always hold: a rank has two exchange groups in memory at most, one that it changes and one that
comes or goes.

Called by `sharded_whole`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zero_comm.collectives import Collectives, Pending, wait
from zero_engine.optim.owner_exchange import (
    ExchangeGroup,
    OwnerExchange,
    Shared,
    in_exchange_groups,
)
from zero_engine.optim.whole import Change
from zero_engine.sharding.flat_unit import FlatUnit, Slot, overlap
from zero_engine.sharding.segments import Segment

_OfGroup = dict[int, Change | None]


class ParameterOwners:
    """Changes parameters of which this rank holds the segments."""

    def __init__(
        self, units: Sequence[FlatUnit], segments: Sequence[Segment], collectives: Collectives
    ) -> None:
        self._units = tuple(units)
        self._segments = tuple(segments)
        self._world = collectives.world
        self._exchange = OwnerExchange(collectives)

    def change(self, tensors: Sequence[Tensor], changes: Sequence[Change | None]) -> None:
        """Put pieces of changed parameters in the place of those there are. Collective.

        Args:
            tensors: One per segment, of its length.
            changes: For each segment that of its param group; None: the group stays as it is.
        """
        of_group = {s.group: change for s, change in zip(self._segments, changes, strict=True)}
        exchange_groups = in_exchange_groups(self._shared(tensors, of_group), self._world)
        coming = self._collect(exchange_groups, 0)
        going = Pending("")
        for number, exchange_group in enumerate(exchange_groups):
            whole, arriving = coming
            wait(arriving)
            coming = self._collect(exchange_groups, number + 1)
            changed = self._changed(exchange_group, whole, of_group)
            wait(going)
            going = self._exchange.give_back(
                exchange_group, changed, f"changed parameters, exchange group {number}"
            )
        wait(going)

    def _shared(self, tensors: Sequence[Tensor], of_group: _OfGroup) -> Iterator[Shared]:
        """All parameters that are changed, in the same order on every rank."""
        held: defaultdict[FlatUnit, list[tuple[Segment, Tensor]]] = defaultdict(list)
        for segment, tensor in zip(self._segments, tensors, strict=True):
            held[segment.unit].append((segment, tensor))
        for unit in self._units:
            for slot in unit.layout.slots:
                if slot.group is not None and of_group[slot.group] is not None:
                    pieces = [_piece(slot, *each) for each in held[unit]]
                    mine = max(pieces, key=Tensor.numel, default=tensors[0][:0])
                    yield Shared(unit, slot, mine)

    def _collect(
        self, exchange_groups: Sequence[ExchangeGroup], number: int
    ) -> tuple[Tensor, Pending]:
        if number == len(exchange_groups):
            return torch.empty(0), Pending("")
        return self._exchange.collect(
            exchange_groups[number], f"whole parameters, exchange group {number}"
        )

    def _changed(self, exchange_group: ExchangeGroup, whole: Tensor, of_group: _OfGroup) -> Tensor:
        owned = self._exchange.owned(exchange_group)
        change = of_group[owned.slot.group] if owned and owned.slot.group is not None else None
        if owned is None or change is None:
            return whole
        return change(whole.view(owned.slot.shape)).contiguous().view(-1)


def _piece(slot: Slot, segment: Segment, tensor: Tensor) -> Tensor:
    """What a segment's tensor has of a parameter of its unit; empty for another group's."""
    start, stop = overlap(slot.start, slot.stop, segment.start, segment.stop)
    return tensor[start - segment.start : stop - segment.start]
