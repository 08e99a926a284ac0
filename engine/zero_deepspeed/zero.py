"""DeepSpeed's `deepspeed.zero`: access to sharded parameters.

`GatheredParameters` is collective. Everything here also takes models that belong to no engine yet,
or are not sharded, so that one script serves all stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from zero_deepspeed.tiling import TiledLinear
from zero_engine.config import read_json
from zero_engine.parameters.access import owner_of
from zero_engine.parameters.construction import DividedConstruction
from zero_engine.parameters.early_shards import refuse_loads
from zero_engine.parameters.gather import GatheredParameters
from zero_engine.parameters.places import ZeroParamStatus
from zero_engine.sharding.partition import make_external

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "ZeroParamStatus",
    "register_external_parameter",
    "unwrap_model_for_generation",
]


class Init:
    """A context that divides the parameters of a model while it is made.

    At most 64 MiB of them in fp32, or two, are whole at a time. The weights are those of an
    ordinary construction on rank 0. Every rank runs the same constructors.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *_: Any,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        **__: Any,
    ) -> None:
        """Prepare the context, or divide a model that exists.

        Args:
            module: A model, which is divided at once.
            config_dict_or_path: A config; at stages 0 to 2 models stay whole.
            config: Another name for it.
            enabled: False makes the context do nothing.
            dtype: Of the parameters when the context ends; None: the dtype in which the config
                computes, or else that in which modules make them.

        Other arguments of DeepSpeed's are accepted, without effect.
        """
        given = config_dict_or_path if config_dict_or_path is not None else config
        self._divides = enabled
        if enabled and given is not None:
            zero = _read(given).get("zero_optimization")
            # In any spelling that `initialize` takes: True is short for stage 1. What is no stage
            # is an error there, which names it.
            stage = zero.get("stage", zero.get("zero_stage")) if isinstance(zero, Mapping) else None
            self._divides = stage in (3, "3")
        self._contexts: list[AbstractContextManager[Any]] = []
        self._dtype = dtype or computes_in(given)
        if module is not None and self._divides:
            for each in module.modules():
                refuse_loads(each)
            # As at the end of a construction: what is whole is divided, and cast.
            with DividedConstruction(module.parameters(), self._dtype):
                pass

    def __enter__(self) -> None:
        """Begin to divide."""
        context: AbstractContextManager[Any]
        context = DividedConstruction(dtype=self._dtype) if self._divides else nullcontext()
        context.__enter__()
        self._contexts.append(context)

    def __exit__(self, *details: Any) -> None:
        """Divide what is still whole."""
        self._contexts.pop().__exit__(*details)


def _read(given: Any) -> Mapping[str, Any]:
    return given if isinstance(given, Mapping) else read_json(given)


def computes_in(given: Any) -> torch.dtype | None:
    """The 16 bits in which a config computes; None: it does not."""
    config = _read(given) if given is not None else {}
    low = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}
    for name in low.keys() & config.keys():
        if isinstance(config[name], Mapping) and config[name].get("enabled") is True:
            return low[name]
    return None


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declare that `module` uses a parameter that another module owns.

    It is not needed for what torch's operators read. An extension in C++ that is given the
    parameter needs it, before `initialize`: the parameter then belongs to the root unit, which is
    whole from the beginning of forward to the end of backward.

    Raises:
        RuntimeError: It is no parameter.
    """
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError(
            f"register_external_parameter({type(module).__name__}): a {type(parameter).__name__} "
            "is no parameter"
        )
    if owner_of(parameter) is None:
        make_external(parameter)


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """The module of an engine, whole for the time of the context, to generate with.

    Every rank enters it. Parameters are gathered once, not for each token.
    """
    module: nn.Module = getattr(model, "module", model)
    with GatheredParameters(module):
        yield module
