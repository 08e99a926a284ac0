"""A module that is given to `initialize` once more: the new engine takes it from the old one.

Libraries do that: Lightning makes one engine to train a module and another to test it. Must always
hold: the new engine begins with the weights that the old one has come to, in their full precision;
the old one is not called by the module any more, and says so if it is called itself.

Called by `initialize`.
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
"""The attribute of a divided module by which its weights are found when the engine is gone."""


def leave_weights(core: Core) -> None:
    """Let a module that is divided keep the shards of its weights, though not the optimizer's."""
    if core.stage.shards_parameters:
        vars(core.module)[_LEFT] = replace(core, zero=None, reducer=None)


def take_over(model: nn.Module) -> None:
    """Make the model whole, if engines have parts of it, and those engines let go. Collective.

    Raises:
        ConfigError: It is a part of what an engine has divided that is gone.
        ZeroError: Its weights are moved off the device.
    """
    left = [vars(module)[_LEFT] for module in model.modules() if _LEFT in vars(module)]
    alive = [place[0] for param in model.parameters() if (place := place_of(param)) is not None]
    for core in {core.coordinator: core for core in (*left, *alive)}.values():
        _let_go(core)
    check_undivided(model)
    thaw(model)


def _let_go(core: Core) -> None:
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
