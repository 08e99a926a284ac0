"""Whole parameters, each on one rank for a moment, from the pieces that all ranks hold.

Owns who gets which. Must always hold:

- A mapping is called with a whole parameter in memory of its own, so its result is the same bits
  whichever rank calls it and however the parameter is divided.
- Parameters go round in *waves* of one per rank, largest first: those of a wave take about as
  long, and a rank has two waves in memory at most, one that it maps and one that comes or goes.

Called by `sharded_whole`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_engine.collectives import Collectives, Pending, wait
from zero_engine.flat_unit import FlatUnit, Slot, overlap
from zero_engine.segments import Segment
from zero_engine.whole import Change


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """One whole parameter of which each rank holds a piece."""

    unit: FlatUnit
    slot: Slot
    change: Change
    mine: Tensor
    """This rank's piece, where it is to be changed."""

    @property
    def divided(self) -> bool:
        """Whether no rank holds all of its unit."""
        return self.unit.master.numel() != self.unit.padded

    def piece(self, rank: int) -> slice:
        """What a rank holds of it, possibly nothing, as elements of the parameter."""
        size = self.unit.master.numel()
        low = rank * size if self.divided else 0
        start, stop = overlap(self.slot.start, self.slot.stop, low, low + size)
        return slice(start - self.slot.start, stop - self.slot.start)


_Wave = Sequence[Shared]
"""By the rank that owns each; the last wave may have fewer than there are ranks."""


class ParameterOwners:
    """Changes parameters of which this rank holds the segments."""

    def __init__(
        self, units: Sequence[FlatUnit], segments: Sequence[Segment], collectives: Collectives
    ) -> None:
        self._units = tuple(units)
        self._segments = tuple(segments)
        self._collectives = collectives

    def change(self, tensors: Sequence[Tensor], changes: Sequence[Change | None]) -> None:
        """Put pieces of changed parameters in the place of those there are. Collective.

        Args:
            tensors: One per segment, of its length.
            changes: For each segment that of its param group; None: the group stays as it is.
        """
        waves = self._waves(tensors, changes)
        coming = self._collect(waves[0], 0) if waves else None
        going = Pending("")
        for number, wave in enumerate(waves):
            assert coming is not None
            whole, arriving = coming
            wait(arriving)
            following = number + 1
            coming = self._collect(waves[following], following) if waves[following:] else None
            changed = self._changed(wave, whole)
            wait(going)
            going = self._give_back(wave, number, changed)
        wait(going)

    # ---- who gets which ----

    def _waves(self, tensors: Sequence[Tensor], changes: Sequence[Change | None]) -> list[_Wave]:
        world = self._collectives.world
        found = sorted(self._shared(tensors, changes), key=lambda shared: -shared.slot.numel)
        return [found[begin : begin + world] for begin in range(0, len(found), world)]

    def _shared(
        self, tensors: Sequence[Tensor], changes: Sequence[Change | None]
    ) -> Iterator[Shared]:
        """All parameters that are changed, in the same order on every rank."""
        held: defaultdict[FlatUnit, list[tuple[Segment, Tensor]]] = defaultdict(list)
        for segment, tensor in zip(self._segments, tensors, strict=True):
            held[segment.unit].append((segment, tensor))
        of_group = {s.group: change for s, change in zip(self._segments, changes, strict=True)}
        for unit in self._units:
            for slot in unit.layout.slots:
                change = of_group[slot.group] if slot.group is not None else None
                if change is not None:
                    pieces = [_piece(slot, *each) for each in held[unit]]
                    mine = max(pieces, key=Tensor.numel, default=tensors[0][:0])
                    yield Shared(unit, slot, change, mine)

    # ---- a wave ----

    def _owned(self, wave: _Wave) -> Shared | None:
        rank = self._collectives.rank
        return wave[rank] if rank < len(wave) else None

    def _collect(self, wave: _Wave, number: int) -> tuple[Tensor, Pending]:
        """Begin to bring the pieces of each parameter to its owner; this rank's, and its coming."""
        owned, rank = self._owned(wave), self._collectives.rank
        whole, wanted = torch.empty(0), {}
        held = {owner: shared.mine for owner, shared in enumerate(wave) if shared.divided}
        if owned is not None:
            whole = owned.mine.new_empty(owned.slot.numel)
            whole[owned.piece(rank)] = owned.mine
            wanted = self._pieces(owned, whole) if owned.divided else {}
        return whole, self._exchange(held, wanted, f"whole parameters, wave {number}")

    def _changed(self, wave: _Wave, whole: Tensor) -> Tensor:
        owned = self._owned(wave)
        if owned is None:
            return whole
        return owned.change(whole.view(owned.slot.shape)).contiguous().view(-1)

    def _give_back(self, wave: _Wave, number: int, changed: Tensor) -> Pending:
        owned, rank = self._owned(wave), self._collectives.rank
        held = {} if owned is None else self._pieces(owned, changed)
        if owned is not None:
            owned.mine.copy_(changed[owned.piece(rank)])
        wanted = {owner: shared.mine for owner, shared in enumerate(wave)}
        return self._exchange(held, wanted, f"changed parameters, wave {number}")

    def _pieces(self, shared: Shared, whole: Tensor) -> dict[int, Tensor]:
        return {rank: whole[shared.piece(rank)] for rank in range(self._collectives.world)}

    def _exchange(
        self, held: Mapping[int, Tensor], wanted: Mapping[int, Tensor], what: str
    ) -> Pending:
        return self._collectives.exchange_pieces(held, wanted, what)


def _piece(slot: Slot, segment: Segment, tensor: Tensor) -> Tensor:
    """What a segment's tensor has of a parameter of its unit; empty for another group's."""
    start, stop = overlap(slot.start, slot.stop, segment.start, segment.stop)
    return tensor[start - segment.start : stop - segment.start]
