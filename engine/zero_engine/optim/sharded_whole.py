"""Norms and changes of whole parameters, of which each rank holds segments.

The `Whole` of an optimizer that steps shards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zero_comm.exchange.collectives import Collectives, Pending, wait
from zero_engine.optim.owner_exchange import (
    ExchangeGroup,
    OwnerExchange,
    Shared,
    in_exchange_groups,
)
from zero_engine.optim.steps import Steps
from zero_engine.optim.whole import CHUNK, Change, Norms, total
from zero_engine.sharding.flat_unit import ALIGN, FlatUnit, overlap
from zero_engine.sharding.segments import Segment

# A norm is summed over chunks in the order of the unit, at any world size and stage. Parameters
# begin at multiples of a chunk, and the padding after them is zero: no chunk belongs to two.
assert ALIGN == CHUNK


class ShardedWhole:
    """Parameters of which each rank holds segments, stepped part by part as `steps` brings them."""

    def __init__(
        self,
        units: Sequence[FlatUnit],
        segments: Sequence[Segment],
        collectives: Collectives,
        steps: Steps,
    ) -> None:
        self._units = tuple(units)
        self._segments = tuple(segments)
        self._collectives = collectives
        self._exchange = OwnerExchange(collectives)
        self._gradients: dict[Tensor, Tensor] = {
            segment.param: segment.gradient for segment in segments
        }
        self._steps = steps

    def parts(self, *, weights_only: bool = False) -> Iterator[None]:
        """All segments at once, or sub-group by sub-group."""
        return self._steps.parts(weights_only=weights_only)

    def direction(self, param: Tensor) -> Tensor | None:
        """In the sum of gradients, which stays in memory when all else is offloaded."""
        return self._gradients.get(param)

    def norms(self, chunks: Sequence[Tensor]) -> list[Norms]:
        """For each segment its pieces of parameters, with their whole norms. Collective."""
        device = self._units[0].full.device
        whole = {u: chunks[0].new_zeros(u.padded // CHUNK, device=device) for u in self._units}
        for segment, norms in zip(self._segments, chunks, strict=True):
            start = segment.start // CHUNK
            whole[segment.unit][start : start + norms.numel()] = norms
        for unit, norms in whole.items():
            # Where every rank steps all of a unit, its own norms are complete already.
            if unit.master.numel() != unit.padded:
                wait(self._collectives.all_gather(norms, f"parameter norms of {unit.spec.name}"))
        summed = {
            unit: self._collectives.to_host(norms.double(), f"parameter norms of {unit.spec.name}")
            for unit, norms in whole.items()
        }
        found: list[Norms] = []
        for segment in self._segments:
            pieces: Norms = []
            for slot in segment.unit.layout.slots:
                start, stop = overlap(slot.start, slot.stop, segment.start, segment.stop)
                if slot.group == segment.group and stop > start:
                    norm = total(summed[segment.unit][slot.start // CHUNK : -(-slot.stop // CHUNK)])
                    pieces.append((slice(start - segment.start, stop - segment.start), norm))
            found.append(pieces)
        return found

    def change(self, tensors: Sequence[Tensor], changes: Sequence[Change | None]) -> None:
        """Put pieces of changed parameters in the place of the present ones. Collective.

        One tensor for each segment, and the change of its param group; None: the group stays.
        """
        of_group = {s.group: change for s, change in zip(self._segments, changes, strict=True)}
        exchange_groups = in_exchange_groups(
            self._changed(tensors, of_group), self._collectives.world
        )
        coming = self._collect(exchange_groups, 0)
        going = Pending("")
        for number, exchange_group in enumerate(exchange_groups):
            whole, arriving = coming
            wait(arriving)
            coming = self._collect(exchange_groups, number + 1)  # while this one is changed
            owned = self._exchange.owned(exchange_group)
            change = of_group[owned.slot.group] if owned and owned.slot.group is not None else None
            if owned is not None and change is not None:
                whole = change(whole.view(owned.slot.shape)).contiguous().view(-1)
            # Two exchange groups are in memory at most: one that is changed, one that goes.
            wait(going)
            going = self._exchange.give_back(
                exchange_group, whole, f"changed parameters, exchange group {number}"
            )
        wait(going)

    def _changed(
        self, tensors: Sequence[Tensor], of_group: dict[int, Change | None]
    ) -> Iterator[Shared]:
        """All parameters that are changed, in the same order on every rank."""
        held: defaultdict[FlatUnit, list[tuple[Segment, Tensor]]] = defaultdict(list)
        for segment, tensor in zip(self._segments, tensors, strict=True):
            held[segment.unit].append((segment, tensor))
        for unit in self._units:
            for slot in unit.layout.slots:
                if slot.group is not None and of_group[slot.group] is not None:
                    pieces = []  # of one segment; those of other groups have none of it
                    for segment, tensor in held[unit]:
                        cut = overlap(slot.start, slot.stop, segment.start, segment.stop)
                        pieces.append(tensor[cut[0] - segment.start : cut[1] - segment.start])
                    mine = max(pieces, key=Tensor.numel, default=tensors[0][:0])
                    yield Shared(unit, slot, mine)

    def _collect(
        self, exchange_groups: Sequence[ExchangeGroup], number: int
    ) -> tuple[Tensor, Pending]:
        if number == len(exchange_groups):
            return torch.empty(0, device="cpu"), Pending("")
        return self._exchange.collect(
            exchange_groups[number], f"whole parameters, exchange group {number}"
        )
