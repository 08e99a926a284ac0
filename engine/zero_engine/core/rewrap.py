"""Takes a module from its engine when it is given to `initialize` once more.

Libraries do that: Lightning makes one engine to train a module and another to test it. The new
engine begins with the weights of the old one, in their full precision; the old one raises if a
script calls it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from zero_engine.offload_states import WEIGHTS
from zero_engine.optim.optimizers import thaw
from zero_engine.parameters.early_shards import EarlyGroup, keep_share
from zero_engine.parameters.places import disown_parameters, place_of
from zero_engine.parts import Core
from zero_engine.sharding.module_state import check_free

_LEFT = "_zero_left"
"""The attribute of a module with hooks that keeps its shards when the engine is deleted."""


def leave_weights(core: Core) -> None:
    """Let a module with hooks keep the shards of its weights, but not those of the optimizer."""
    if core.stage.shards_parameters or core.overlap.units:
        vars(core.module)[_LEFT] = replace(core, zero=None, reducer=None)


def take_over(model: nn.Module) -> None:
    """Give a model its weights, if engines have parts of it, and detach those engines. Collective.

    Raises:
        ConfigError: The model is a part of the module of an engine that has been deleted.
        ZeroError: Its weights are moved off the device.
    """
    left = [vars(module)[_LEFT] for module in model.modules() if _LEFT in vars(module)]
    alive = [place[0] for param in model.parameters() if (place := place_of(param)) is not None]
    taken = set(model.parameters())
    # By the coordinator: what `leave_weights` has left is a copy of an engine's record.
    for core in {core.coordinator: core for core in (*left, *alive)}.values():
        core.moved.need("initialize() once more", WEIGHTS)
        _unhook(core)
        group = EarlyGroup(core.collectives) if core.stage.shards_parameters else None
        for unit in core.units:
            weights = unit.gather_highest()
            # What was never cast keeps its dtype, such as a frozen parameter in fp64.
            is_cast = unit.spec.trained or core.layout.config.compute != "fp32"
            dtype = torch.float32 if is_cast and weights.is_floating_point() else weights.dtype
            for slot, param in zip(unit.layout.slots, unit.params, strict=True):
                values = weights[slot.start : slot.stop].view(slot.shape)
                # What the next engine takes stays divided; what is left to the script becomes
                # whole.
                if group is not None and param in taken:
                    keep_share(param, values, dtype, group)
                else:
                    param.data = values.to("cpu", dtype, copy=True)
            del weights, values  # before the next unit is gathered
        core.moved.given_away = True
    # Behind the engines that have left a record: what is still marked is of one that has none.
    check_free(model)
    thaw(model)


def _unhook(core: Core) -> None:
    core.coordinator.unhook()
    core.overlap.unhook()
    if core.reducer is not None:
        core.reducer.unhook()
    disown_parameters(core)
    vars(core.module).pop(_LEFT, None)


def take_without_weights(model: nn.Module) -> None:
    """Detach the engines of a model, whose parameters then have undefined values. Not collective.

    For a model that gets all of its weights from elsewhere right after.
    """
    places = [place_of(param) for param in model.parameters()]
    for core in {place[0].coordinator: place[0] for place in places if place is not None}.values():
        _unhook(core)
        core.moved.given_away = True
        for unit in core.units:
            for slot, param in zip(unit.layout.slots, unit.params, strict=True):
                param.data = torch.empty(slot.shape, dtype=unit.full.dtype, device="cpu")
    thaw(model)
