"""The weights of a whole model, gathered from the shards; the same at every world size and stage.

Everything here is collective, and one unit is whole at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from zero_checkpoint.state.torch_state import persistent_buffers
from zero_engine.sharding.flat_unit import FlatUnit


def whole_weights(units: Iterable[FlatUnit]) -> Iterator[tuple[str, Tensor]]:
    """Name and value of each parameter, whole, in the highest precision. Collective."""
    for unit in units:
        weights = unit.gather_highest()
        for slot in unit.layout.slots:
            yield slot.fqn, weights[slot.start : slot.stop].view(slot.shape)


def state(
    module: nn.Module,
    units: Iterable[FlatUnit],
    left_out: Collection[str] = (),
    *,
    highest: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Name and value of each persistent buffer and parameter; see `module_state_dict`."""
    yield from (each for each in persistent_buffers(module) if each[0] not in left_out)
    for unit in units:
        slots = [slot for slot in unit.layout.slots if slot.fqn not in left_out]
        # The same on every rank, as the gather below has to be.
        if not slots:
            continue
        weights = unit.gather_highest()
        for slot in slots:
            part = weights[slot.start : slot.stop].view(slot.shape)
            yield slot.fqn, part if highest else part.to(unit.full.dtype)
            del part
        del weights  # else two units would be whole while the next one is gathered


def state_table(
    module: nn.Module, units: Iterable[FlatUnit]
) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """By name, the dtype and the shape of what `state` yields. Not collective."""
    buffers = {name: (buffer.dtype, buffer.shape) for name, buffer in persistent_buffers(module)}
    params = {
        slot.fqn: (unit.full.dtype, slot.shape) for unit in units for slot in unit.layout.slots
    }
    return buffers | params


def module_state_dict(
    module: nn.Module,
    units: Sequence[FlatUnit],
    aliases: Mapping[str, str],
    *,
    highest: bool = False,
    left_out: Collection[str] = (),
    here: bool = True,
) -> dict[str, Tensor]:
    """The state_dict of the module on the CPU, without the names that are left out. Collective.

    Highest: floating-point tensors are fp32, from master weights if they are trained. A rank that
    wants none `here` holds one unit at a time; what others get is in separate memory.
    """
    dtypes = {name: dtype for name, (dtype, _) in state_table(module, units).items()}
    whole: dict[str, Tensor] = {}
    for name, value in state(module, units, left_out, highest=True):
        if here:
            widened = highest and value.is_floating_point()
            dtype = torch.float32 if widened else dtypes[name]
            whole[name] = value.to("cpu", dtype, copy=True)
        del value  # a view of a unit, which is freed before the next one is gathered
    return whole | {other: whole[name] for other, name in aliases.items() if name in whole}
