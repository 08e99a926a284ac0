"""DeepSpeed's `deepspeed.zero`: access to sharded parameters.

`GatheredParameters` is collective. Everything here also takes models that belong to no engine yet,
or are not sharded, so that one script serves all stages.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from zero_contract.errors import ZeroError
from zero_engine.parameters.access import owner_of
from zero_engine.parameters.gather import GatheredParameters
from zero_engine.parameters.places import ZeroParamStatus
from zero_engine.sharding.partition import make_external

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus", "register_external_parameter"]

_log = logging.getLogger(__name__)


class Init:
    """The context in which DeepSpeed shards a model while it is made.

    Here a model is whole in each rank's host memory until `initialize` shards it, unit by unit:
    this context changes nothing, and accepts DeepSpeed's arguments.
    """

    def __init__(self, module: nn.Module | None = None, *_: Any, enabled: bool = True, **__: Any):
        if enabled and module is None:
            _log.info("zero.Init: the model stays whole in host memory until initialize()")

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declare that `module` uses a parameter that another module owns. Before `initialize`.

    The parameter then belongs to the root unit, which is whole from the beginning of forward to
    the end of backward.

    Raises:
        ZeroError: The parameter is sharded already.
    """
    if owner_of(parameter) is not None:
        raise ZeroError(
            f"register_external_parameter({type(module).__name__}): the parameters are divided "
            "already; call it before initialize(), in the module's constructor for example"
        )
    make_external(parameter)
