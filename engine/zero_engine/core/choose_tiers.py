"""Which tier the state of each unit rests in, from the config.

Owns the rules of `ratio` and `max_in_cpu` as pure functions, and makes the tiers: one scratch
file per directory. Called by `initialize`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch

from zero_engine.config.offload import (
    CPU,
    MOST_WIDENED,
    NONE,
    NVME,
    OffloadOptimizer,
    OffloadParam,
)
from zero_engine.config.schema import ZeroOptimization
from zero_engine.optim.sub_groups import Pace
from zero_engine.sharding.flat_unit import UnitTiers, plan_layout
from zero_engine.sharding.partition import UnitSpec
from zero_engine.tiers.ahead import ReadAhead
from zero_engine.tiers.nvme import Nvme
from zero_engine.tiers.places import Memory, Tier
from zero_engine.tiers.scratch import ScratchFile

_WIDEST_BYTES = 4
"""Of an element: buffers are counted in elements."""


@dataclass(frozen=True, slots=True)
class UnitSize:
    """What the choice depends on."""

    shard: int
    """Elements on each rank."""
    trained: bool


def offloaded(sizes: Sequence[UnitSize], ratio: float) -> list[bool]:
    """Which units' state is offloaded: the first ones, until there is the wanted part of it."""
    trained = [size.shard if size.trained else 0 for size in sizes]
    before = accumulate(trained, initial=0)
    wanted = ratio * sum(trained)
    return [size.trained and begun < wanted for size, begun in zip(sizes, before, strict=False)]


def kept_in_cpu(sizes: Sequence[UnitSize], max_in_cpu: int) -> list[bool]:
    """Which units' weights stay in the host's memory: the first ones that find room."""
    return [end <= max_in_cpu for end in accumulate(size.shard for size in sizes)]


def unit_sizes(specs: Sequence[UnitSpec], world: int) -> list[UnitSize]:
    """The sizes of units that are not made yet."""
    layouts = [plan_layout([(m.fqn, m.param.shape, m.group) for m in s.members]) for s in specs]
    return [
        UnitSize(layout.padded(world) // world, spec.trained)
        for spec, layout in zip(specs, layouts, strict=True)
    ]


def pace_of(config: ZeroOptimization, *, low_precision: bool = False) -> Pace:
    """How sub-groups follow each other; `low_precision`: their state rests in 16 bits."""
    optimizer = config.offload_optimizer
    size = config.sub_group_size
    return Pace(
        sub_group_size=min(size, MOST_WIDENED) if low_precision else size,
        reads_ahead=optimizer.pipeline_read,
        writes_behind=optimizer.pipeline_write,
    )


@dataclass(slots=True)
class Tiers:
    """Makes the tiers of one engine."""

    config: ZeroOptimization
    device: torch.device
    _made: dict[tuple[str, str | None], Tier] = field(default_factory=dict)

    def choose(self, sizes: Sequence[UnitSize]) -> list[UnitTiers]:
        """The tiers of each unit, in the order of the units.

        Raises:
            TierError: There can be no scratch file.
        """
        optimizer, param = self.config.offload_optimizer, self.config.offload_param
        ratio = optimizer.ratio if optimizer.device != NONE else 0.0
        in_cpu = kept_in_cpu(sizes, param.max_in_cpu)
        return [
            self._of_unit(size, away, stays)
            for size, away, stays in zip(sizes, offloaded(sizes, ratio), in_cpu, strict=True)
        ]

    def _of_unit(self, size: UnitSize, away: bool, stays: bool) -> UnitTiers:
        optimizer, param = self.config.offload_optimizer, self.config.offload_param
        weights_device = CPU if param.device == NVME and stays else param.device
        weights = self._tier(weights_device, param)
        if not size.trained:
            return UnitTiers(weights, weights)
        return UnitTiers(self._tier(optimizer.device if away else NONE, optimizer), weights, away)

    def _tier(self, device: str, section: OffloadOptimizer | OffloadParam) -> Tier:
        """The tier on a device: one for all that rests there."""
        key = device, section.nvme_path if device == NVME else None
        if key not in self._made:
            self._made[key] = self._make_tier(device, section)
        return self._made[key]

    def _make_tier(self, device: str, section: OffloadOptimizer | OffloadParam) -> Tier:
        pin = section.pin_memory and self.device.type == "cuda"
        if device != NVME:
            rests_on = torch.device("cpu") if device == CPU else self.device
            return Memory(rests_on, used_on=self.device, pin=pin)
        assert section.nvme_path is not None
        return Nvme(ScratchFile(Path(section.nvme_path)), self._read_ahead(), pin=pin)

    def _read_ahead(self) -> ReadAhead:
        param = self.config.offload_param
        reads = max(param.buffer_count - 1, 0)  # one of the buffers is for what is needed now
        return ReadAhead(reads, reads * param.buffer_size * _WIDEST_BYTES)
