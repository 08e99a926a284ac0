"""Takes a module from its engine when it is given to `initialize` once more.

Libraries do that: Lightning makes one engine to train a module and another to test it. Must always
hold: the new engine begins with the weights of the old one, in their full precision; the module
does not call the old engine any more, which raises if a script calls it.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from zero_engine.offload_states import WEIGHTS
from zero_engine.optim.optimizers import thaw
from zero_engine.parameters.places import disown_parameters, place_of
from zero_engine.parts import Core
from zero_engine.sharding.module_state import check_undivided
from zero_engine.sharding.weights import module_state_dict

_LEFT = "_zero_left"
"""The attribute of a sharded module that keeps its shards when the engine is deleted."""


def leave_weights(core: Core) -> None:
    """Let a sharded module keep the shards of its weights, but not those of the optimizer."""
    if core.stage.shards_parameters:
        vars(core.module)[_LEFT] = replace(core, zero=None, reducer=None)


def take_over(model: nn.Module) -> None:
    """Make the model whole, if engines have parts of it, and detach those engines. Collective.

    Raises:
        ConfigError: The model is a part of the module of an engine that has been deleted.
        ZeroError: Its weights are moved off the device.
    """
    left = [vars(module)[_LEFT] for module in model.modules() if _LEFT in vars(module)]
    alive = [place[0] for param in model.parameters() if (place := place_of(param)) is not None]
    for core in {core.coordinator: core for core in (*left, *alive)}.values():
        core.moved.need("initialize() once more", WEIGHTS)
        whole = module_state_dict(core.module, core.units, core.aliases, highest=True)
        core.coordinator.unhook()
        if core.reducer is not None:
            core.reducer.unhook()
        disown_parameters(core)
        for name, param in core.module.named_parameters():
            param.data = whole[name]
        vars(core.module).pop(_LEFT, None)
        core.moved.give_away()
    check_undivided(model)
    thaw(model)
