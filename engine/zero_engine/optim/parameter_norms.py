"""The norms of whole parameters, from the shards that all ranks hold.

Must always hold: a norm is summed over chunks of 64 elements in the order of the unit, so it
does not depend on the world size or the stage. Parameters begin at multiples of 64 and the
padding after them is zero, so no chunk belongs to two of them.

Called by `sharded_whole`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zero_comm.collectives import Collectives, wait
from zero_engine.optim.whole import CHUNK, Norms, total
from zero_engine.sharding.flat_unit import ALIGN, FlatUnit, overlap
from zero_engine.sharding.segments import Segment

assert ALIGN == CHUNK


class ParameterNorms:
    """Norms of parameters of which this rank holds the segments."""

    def __init__(
        self, units: Sequence[FlatUnit], segments: Sequence[Segment], collectives: Collectives
    ) -> None:
        self._units = tuple(units)
        self._segments = tuple(segments)
        self._collectives = collectives

    def of(self, chunks: Sequence[Tensor]) -> list[Norms]:
        """For each segment its pieces of parameters, with their whole norms. Collective.

        Args:
            chunks: For each segment the norms of its chunks.
        """
        whole = self._gather(chunks)
        return [self._pieces(segment, whole[segment.unit]) for segment in self._segments]

    def _gather(self, own: Sequence[Tensor]) -> dict[FlatUnit, Tensor]:
        """The chunk norms of each whole unit, [padded / 64] in fp64 on the CPU."""
        device = self._units[0].full.device
        whole = {u: own[0].new_zeros(u.padded // CHUNK, device=device) for u in self._units}
        for segment, norms in zip(self._segments, own, strict=True):
            start = segment.start // CHUNK
            whole[segment.unit][start : start + norms.numel()] = norms
        for unit, norms in whole.items():
            # Where every rank steps all of a unit, its own norms are complete already.
            if unit.master.numel() != unit.padded:
                wait(self._collectives.all_gather(norms, f"parameter norms of {unit.name}"))
        return {unit: norms.double().cpu() for unit, norms in whole.items()}

    def _pieces(self, segment: Segment, chunks: Tensor) -> Norms:
        pieces: Norms = []
        for slot in segment.unit.layout.slots:
            start, stop = overlap(slot.start, slot.stop, segment.start, segment.stop)
            if slot.group == segment.group and stop > start:
                norm = total(chunks[slot.start // CHUNK : -(-slot.stop // CHUNK)])
                pieces.append((slice(start - segment.start, stop - segment.start), norm))
        return pieces
