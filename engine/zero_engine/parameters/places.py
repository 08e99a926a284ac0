"""Which engine a parameter belongs to, and where in it.

Must always hold: knowing it keeps no engine alive, and a parameter can be pickled; at stage 3 it
has the attributes by which scripts tell that it must be gathered first.

Called by `initialize`, `rewrap`, `gather` and `access`.
"""

from __future__ import annotations

import weakref
from enum import Enum
from functools import partial

from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from zero_engine.parts import Core
from zero_engine.sharding.flat_unit import FlatUnit, Slot

_PLACES = WeakTensorKeyDictionary()
"""Parameter -> (weak reference to the core, unit, slot). No attribute of the parameter: scripts
pickle parameters with all that hangs on them."""
_TOLD = ("ds_id", "ds_shape", "ds_numel", "ds_status", "partition_numel")
"""What DeepSpeed's parameters have, and so ours at stage 3."""


class ZeroParamStatus(Enum):
    """DeepSpeed's names for whether a parameter of stage 3 can be read."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def adopt_parameters(core: Core) -> None:
    """Note where the parameters of an engine lie."""
    world = core.collectives.world
    for number, unit in enumerate(core.units):
        for place, (slot, param) in enumerate(zip(unit.layout.slots, unit.params, strict=True)):
            _PLACES[param] = (weakref.ref(core), number, place)
            if core.stage.shards_parameters:
                vars(param).update(
                    ds_id=id(param),
                    ds_shape=slot.shape,
                    ds_numel=slot.numel,
                    partition_numel=partial(int, -(-slot.numel // world)),  # can be pickled
                )
        tell_status(core, unit)


def disown_parameters(core: Core) -> None:
    """The inverse: they are nobody's."""
    for unit in core.units:
        for param in unit.params:
            _PLACES.pop(param, None)
            for name in _TOLD:
                vars(param).pop(name, None)


def tell_status(core: Core, unit: FlatUnit) -> None:
    """Set the parameters' `ds_status`; inside forward and backward it is not kept up."""
    if core.stage.shards_parameters:
        status = ZeroParamStatus.AVAILABLE if unit.gathered else ZeroParamStatus.NOT_AVAILABLE
        for param in unit.params:
            vars(param)["ds_status"] = status


def place_of(param: nn.Parameter) -> tuple[Core, FlatUnit, Slot] | None:
    """Where it is; None if no engine has it."""
    reference, number, place = _PLACES.get(param, (lambda: None, 0, 0))
    core: Core | None = reference()
    if core is None:
        return None
    unit = core.units[number]
    return core, unit, unit.layout.slots[place]
