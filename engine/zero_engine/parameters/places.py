"""The engine that a parameter belongs to, and its place there.

At stage 3 a parameter has the attributes by which scripts see that it must be gathered first.
"""

from __future__ import annotations

import weakref
from enum import Enum
from functools import partial

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from zero_engine.parts import Core
from zero_engine.sharding.flat_unit import FlatUnit, Slot

_PLACES = WeakTensorKeyDictionary()
"""Parameter -> (weak reference to the core, unit, slot). It is no attribute of the parameter,
because scripts pickle parameters with all of their attributes."""
_ATTRIBUTES = ("ds_id", "ds_shape", "ds_numel", "ds_status", "ds_persist", "partition_numel")
"""The attributes of a parameter at stage 3, as in DeepSpeed."""


class ZeroParamStatus(Enum):
    """DeepSpeed's names for whether a parameter of stage 3 can be read."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def adopt_parameters(core: Core) -> None:
    """Record the places of an engine's parameters."""
    world = core.collectives.world
    for number, unit in enumerate(core.units):
        for place, (slot, param) in enumerate(zip(unit.layout.slots, unit.params, strict=True)):
            # Weakly, and by numbers: a parameter that outlives its engine does not keep its memory.
            _PLACES[param] = (weakref.ref(core), number, place)
            if core.stage.shards_parameters:
                show_as_divided(param, slot.shape, world)
            else:  # `zero.Init` may have divided it before
                hide_attributes(param)
        if core.stage.shards_parameters:
            for each in unit.small.members:
                vars(each.param).update(ds_status=ZeroParamStatus.AVAILABLE, ds_persist=True)


def show_as_divided(param: Tensor, shape: torch.Size, world: int) -> None:
    """Give a parameter the attributes by which scripts see that it must be gathered first."""
    vars(param).update(
        ds_id=id(param),
        ds_shape=shape,
        ds_numel=shape.numel(),
        ds_status=ZeroParamStatus.NOT_AVAILABLE,
        ds_persist=False,
        partition_numel=partial(int, -(-shape.numel() // world)),  # can be pickled
    )


def hide_attributes(param: Tensor) -> None:
    """Take these attributes from a parameter that is whole."""
    for name in _ATTRIBUTES:
        vars(param).pop(name, None)


def disown_parameters(core: Core) -> None:
    """Remove the records of an engine's parameters."""
    for unit in core.units:
        for param in unit.params:
            _PLACES.pop(param, None)
            hide_attributes(param)


def place_of(param: Tensor) -> tuple[Core, FlatUnit, Slot] | None:
    """The core, unit and slot of a parameter; None if it belongs to no engine."""
    reference, number, place = _PLACES.get(param, (lambda: None, 0, 0))
    core: Core | None = reference()
    if core is None:
        return None
    unit = core.units[number]
    return core, unit, unit.layout.slots[place]
