"""The choice of the tiers in which weights and optimizer state rest, from the config.

Owns the rules of `ratio` and `max_in_cpu` as pure functions, and makes the tiers: one scratch file
per directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch

from zero_engine.config.offload import (
    CPU,
    NONE,
    NVME,
    OffloadOptimizer,
    OffloadParam,
)
from zero_engine.config.schema import ZeroOptimization
from zero_engine.sharding.flat_unit import UnitTiers, plan_layout
from zero_engine.sharding.partition import UnitSpec
from zero_engine.tiers.nvme import Nvme
from zero_engine.tiers.places import Memory, Tier
from zero_engine.tiers.scratch import ScratchFile


@dataclass(frozen=True, slots=True)
class UnitSize:
    """The size of a unit, on which the choice depends."""

    shard: int
    """Elements on each rank."""
    trained: bool


def offloaded(sizes: Sequence[UnitSize], ratio: float) -> list[bool]:
    """For each unit whether its state is offloaded: the first ones, up to `ratio` of all."""
    trained = [size.shard if size.trained else 0 for size in sizes]
    before = accumulate(trained, initial=0)
    wanted = ratio * sum(trained)
    return [size.trained and begun < wanted for size, begun in zip(sizes, before, strict=False)]


def kept_in_cpu(sizes: Sequence[UnitSize], max_in_cpu: int) -> list[bool]:
    """For each unit whether its weights stay in host memory: the first `max_in_cpu` elements."""
    return [end <= max_in_cpu for end in accumulate(size.shard for size in sizes)]


def unit_sizes(specs: Sequence[UnitSpec], world: int) -> list[UnitSize]:
    """The sizes of units that are not made yet."""
    layouts = [plan_layout([(m.fqn, m.param.shape, m.group) for m in s.members]) for s in specs]
    return [
        UnitSize(layout.padded(world) // world, spec.trained)
        for spec, layout in zip(specs, layouts, strict=True)
    ]


@dataclass(slots=True)
class Tiers:
    """Makes the tiers of one engine."""

    config: ZeroOptimization
    device: torch.device
    _made: dict[tuple[str, str | None], Tier] = field(default_factory=dict)

    def choose(self, sizes: Sequence[UnitSize]) -> list[UnitTiers]:
        """The tiers of each unit, in the order of the units.

        Raises:
            TierError: The scratch file cannot be made.
        """
        optimizer, param = self.config.offload_optimizer, self.config.offload_param
        away = offloaded(sizes, optimizer.ratio if optimizer.device != NONE else 0.0)
        in_cpu = kept_in_cpu(sizes, param.max_in_cpu)
        tiers = []
        for size, is_away, stays in zip(sizes, away, in_cpu, strict=True):
            weights = self._tier(CPU if param.device == NVME and stays else param.device, param)
            if size.trained:
                state = self._tier(optimizer.device if is_away else NONE, optimizer)
                tiers.append(UnitTiers(state, weights, is_away))
            else:
                tiers.append(UnitTiers(weights, weights))
        return tiers

    def _tier(self, device: str, section: OffloadOptimizer | OffloadParam) -> Tier:
        """The tier on a device, one for all tensors there; on NVMe one for each directory."""
        key = device, section.nvme_path if device == NVME else None
        if key in self._made:
            return self._made[key]
        pin = section.pin_memory and self.device.type == "cuda"
        tier: Tier
        if device == NVME:
            assert section.nvme_path is not None
            tier = Nvme(ScratchFile(Path(section.nvme_path)), pin=pin)
        else:
            rests_on = torch.device("cpu") if device == CPU else self.device
            tier = Memory(rests_on, used_on=self.device, pin=pin)
        self._made[key] = tier
        return tier
