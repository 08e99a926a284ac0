"""Stage 3: `state_dict()` and `load_state_dict()` of a module, called without the engine.

Owns torch's hooks for that. Must always hold: an empty tensor stands in the place of weights that
are sharded, with a warning, and weights that would be lost are an error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from zero_contract.errors import ConfigError, ZeroError
from zero_engine.sharding.flat_unit import FlatUnit
from zero_engine.sharding.module_hooks import Hook
from zero_engine.sharding.recorded_load import is_recorded

_log = logging.getLogger(__name__)

_KEPT = WeakTensorKeyDictionary()
"""The parameters that hooks fill, even those of an engine that has been deleted -> how it is."""


def keep(params: Iterable[nn.Parameter], how: str) -> None:
    """Note that hooks fill these parameters of an engine, and what they are, for the error."""
    _KEPT.update((param, how) for param in params)


def let_go(params: Iterable[nn.Parameter]) -> None:
    """Note that the hooks of these parameters are removed."""
    for param in params:
        _KEPT.pop(param, None)


def check_free(model: nn.Module) -> None:
    """Refuse a model whose parameters are filled by hooks.

    Raises:
        ConfigError: So it is with a parameter of the model.
    """
    for name, param in model.named_parameters():
        if param in _KEPT:
            raise ConfigError(
                f"parameter {name} is {_KEPT[param]} that is gone; give initialize() all of that "
                "engine's module, or a new one"
            )


class ModuleState:
    """The hooks of one model."""

    def __init__(self, root: nn.Module, units: Sequence[FlatUnit]) -> None:
        """Hook every module of `root`."""
        self._units = {id(param): unit for unit in units for param in unit.params}
        self._whole = {id(each.param) for unit in units for each in unit.small.members}
        self._warned = False
        keep((p for unit in units for p in unit.params), "divided, by an engine at stage 3")
        self._hooks: list[RemovableHandle] = []
        for module in root.modules():
            self._hooks += [
                module.register_state_dict_post_hook(Hook(self._copy_what_is_there)),
                module.register_load_state_dict_pre_hook(Hook(self._refuse_to_load)),
            ]

    def remove(self) -> None:
        """Remove the hooks from the module, whose parameters are going to be whole."""
        while self._hooks:
            self._hooks.pop().remove()
        for unit in self._units.values():
            let_go(unit.params)

    def _is_there(self, param: nn.Parameter) -> bool:
        unit = self._units.get(id(param))
        # Of others, of small ones and of empty ones nothing is ever away.
        if unit is None or id(param) in self._whole or param.numel() == 0:
            return True
        return unit.gathered

    def _copy_what_is_there(
        self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any
    ) -> None:
        """A module's state_dict: copies of gathered parameters; empty tensors for the others."""
        for name, param in module._parameters.items():
            shown = state.get(prefix + name)
            if param is None or shown is None or shown is param:  # itself with keep_vars
                continue
            there = self._is_there(param)
            # A copy: the parameter itself shows NaN as soon as it is released again.
            state[prefix + name] = param.detach().clone() if there else param.new_empty(0)
            if not there and not self._warned:
                self._warned = True
                _log.warning(
                    "state_dict() at stage 3: the parameters are divided, and where they are not "
                    "gathered there is an empty tensor, as in DeepSpeed; call "
                    "engine.module_state_dict() or engine.save_16bit_model() on every rank"
                )

    def _refuse_to_load(
        self, module: nn.Module, state: dict[str, Any], prefix: str, *_details: object
    ) -> None:
        # A parameter that is not gathered has no memory to write to.
        for name, param in module._parameters.items():
            if param is None or prefix + name not in state or is_recorded(param):
                continue
            if not self._is_there(param):
                raise ZeroError(
                    f"load_state_dict() at stage 3: {prefix}{name} is divided; load the weights "
                    "before initialize(), with engine.load_state_dict(), or inside "
                    "zero.GatheredParameters(parameters, modifier_rank=0)"
                )
