"""DeepSpeed's `deepspeed.zero`: parameters that are sharded, made whole for a while.

`GatheredParameters` is collective. Everything here also takes models that no engine has yet, or
that are at a stage without sharded parameters, so that one script serves all stages.
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

    Here a model is whole in each rank's host memory until `initialize` divides it, unit by unit:
    this context changes nothing, and takes what DeepSpeed's takes.
    """

    def __init__(self, module: nn.Module | None = None, *_: Any, enabled: bool = True, **__: Any):
        if enabled and module is None:
            _log.info("zero.Init: the model stays whole in host memory until initialize()")

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, *_: object) -> None:
        """Nothing to do."""


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say that `module` uses a parameter that another module owns. Before `initialize`.

    The parameter then belongs to the root unit, which is whole from the beginning of forward to
    the end of backward.

    Raises:
        ZeroError: Too late.
    """
    if owner_of(parameter) is not None:
        raise ZeroError(
            f"register_external_parameter({type(module).__name__}): the parameters are divided "
            "already; call it before initialize(), in the module's constructor for example"
        )
    make_external(parameter)
