"""The options of an optimizer's param groups, which have to be the same on all ranks.

Must always hold: where they differ, all ranks know before weights change. Otherwise each would
train weights of its own, or its shard at another rate: a rate that follows from the loss of one
rank's samples, as by ReduceLROnPlateau, is enough.

Compared are numbers, text, and tuples of them. A tensor on a device is not read: the host would
wait for it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zero_comm.exchange.collectives import Collectives
from zero_comm.exchange.objects import gather_objects
from zero_contract.errors import ZeroError
from zero_step.agree import Agreed

_EXACT = (1 << 24) - 1
"""The largest whole number of 24 bits, which fp32 holds exactly."""
_DIFFERS = (
    "param group {}: {} is {} on rank 0 and {} on rank {}, so the ranks would train different "
    "weights; give all ranks the same: a schedule that follows a metric needs that of all ranks, "
    "such as the mean loss of the step"
)


def _plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _options(optimizer: torch.optim.Optimizer, more: Mapping[str, Any]) -> list[dict[str, Any]]:
    """By group, whatever their order is, and those of the step."""
    groups = [dict(more)] if more else []
    for group in optimizer.param_groups:
        told = {}
        for key, value in group.items():
            if isinstance(value, Tensor) and value.is_cpu and value.numel() == 1:
                told[key] = value.item()
            elif key != "params" and _plain(value):
                told[key] = value
        groups.append(told)
    return sorted(groups, key=json.dumps)


def digest(
    optimizer: torch.optim.Optimizer,
    collectives: Collectives,
    device: torch.device,
    **more: float | None,
) -> Tensor:
    """A whole number that differs, almost surely, if an option does: [] on this device.

    `more`: options of this step, beside those of its optimizer.
    """
    checksum = zlib.crc32(json.dumps(_options(optimizer, more)).encode()) & _EXACT
    return collectives.numbers([checksum], device).long()[0]


def check(
    agreed: Agreed,
    optimizer: torch.optim.Optimizer,
    collectives: Collectives,
    **more: float | None,
) -> None:
    """Compare the options of all ranks, if their digests differ. Collective. See `digest`.

    Raises:
        ZeroError: They differ; names the first one.
    """
    if agreed.alike:
        return
    everybodys = gather_objects(_options(optimizer, more), "param groups", collectives.everybodys)
    for rank, others in enumerate(everybodys):
        for number, (ours, theirs) in enumerate(zip(everybodys[0], others, strict=False)):
            for key in sorted(ours.keys() | theirs.keys()):
                if (mine := ours.get(key)) != (other := theirs.get(key)):
                    raise ZeroError(_DIFFERS.format(number, key, mine, other, rank))
