"""The rows of one unit: its master weights, and the keys of its optimizer's state, where they rest.

Owns their places, and the low precision in which state may rest: the optimizer sees fp32 copies,
which are rounded once, after the step, so the result depends neither on how kernels round, nor on
stage, world size or tier.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from zero_engine.sharding.flat_unit import GRAIN, FlatUnit, round_up
from zero_engine.sharding.segments import Segment
from zero_engine.tiers.places import Tier

WEIGHTS = ".weights"
"""The row of master weights; optimizers have no key with a dot."""

Options = frozenset[str]
"""The names of a param group's options."""

_LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Moments:
    """The dtype in which state rests that is fp32 to the optimizer."""

    dtype: torch.dtype = torch.float32

    def resting(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which state rests that the optimizer has in `dtype`."""
        return self.dtype if dtype == torch.float32 else dtype

    def as_stepped(self, state: Tensor) -> Tensor:
        """State as the optimizer is to see it; unchanged if the optimizer itself keeps 16 bits."""
        return state if self.dtype == torch.float32 else widened(state)


def widened(resting: Tensor) -> Tensor:
    """The values in fp32; a copy only if they rest in 16 bits."""
    return resting.float() if resting.dtype in _LOW_PRECISION else resting


def brought(values: Tensor, place: Tensor) -> Tensor:
    """`place`, filled with the values, so that no reference to a copy of them is left."""
    if values.data_ptr() != place.data_ptr():
        place.copy_(values)
    return place


class Rows:
    """Tensors over stretches of one shard, by name."""

    def __init__(
        self,
        unit: FlatUnit,
        tier: Tier,
        segments: Sequence[Segment],
        groups: Sequence[Options],
        moments: Moments,
    ) -> None:
        """Begin with the row of weights; others are made on first use, as `moments` rest."""
        self._moments = moments
        self._tier = tier
        self._low = unit.interval[0]
        self._kinds = {s: groups[s.group] for s in segments}
        self._numel = unit.shard.numel()
        self._rows = {WEIGHTS: (0, unit.shard)}

    def cuts(self, starts: Sequence[int]) -> list[tuple[int, int]]:
        """The stretches between these starts, and between those where a row begins or ends."""
        ends = {bound for kind in self._kinds.values() for bound in self._stretch(kind)}
        bounds = sorted({*starts, *ends, self._numel})
        return list(pairwise(bounds))

    def _stretch(self, kind: Options) -> tuple[int, int]:
        """The elements of the shard that the row of a kind covers."""
        # Only what has the key: a Muon keeps a momentum for its groups of matrices, two moments for
        # others.
        alike = [segment for segment, other in self._kinds.items() if other == kind]
        start = min(segment.start for segment in alike) - self._low
        stop = max(segment.stop for segment in alike) - self._low
        return start // GRAIN * GRAIN, min(round_up(stop, GRAIN), self._numel)

    def name(self, segment: Segment, key: str) -> str:
        """The name of the row of a segment's key."""
        kinds = list(dict.fromkeys(self._kinds.values()))
        return f"{key}.{kinds.index(self._kinds[segment])}"

    def place(self, segment: Segment, key: str, dtype: torch.dtype | None = None) -> Tensor:
        """A segment's part of the row of a key; made for state of `dtype` if missing."""
        name = self.name(segment, key)
        dtype = None if dtype is None else self._moments.resting(dtype)
        # A checkpoint may bring a key in another dtype than its row has.
        if dtype is not None and (name not in self._rows or self._rows[name][1].dtype != dtype):
            start, stop = self._stretch(self._kinds[segment])
            self._rows[name] = start, self._tier.zeros(stop - start, dtype)
        return self._of_segment(segment, *self._rows[name])

    def weights(self, segment: Segment) -> Tensor:
        """A segment's part of the master weights."""
        return self._of_segment(segment, *self._rows[WEIGHTS])

    def _of_segment(self, segment: Segment, begin: int, row: Tensor) -> Tensor:
        begin += self._low
        return row[segment.start - begin : segment.stop - begin]

    def between(self, start: int, stop: int, names: Container[str]) -> dict[str, Tensor]:
        """Elements [start, stop) of the shard in some rows, all of which cover them."""
        return {
            name: row[start - begin : stop - begin]
            for name, (begin, row) in self._rows.items()
            if name in names
        }


def rows_of(
    tiers: Mapping[FlatUnit, Tier],
    segments: Sequence[Segment],
    groups: Sequence[Options],
    moments: Moments,
) -> dict[FlatUnit, Rows]:
    """The rows of each unit whose state rests in a tier."""
    return {
        unit: Rows(unit, tier, [s for s in segments if s.unit is unit], groups, moments)
        for unit, tier in tiers.items()
    }
