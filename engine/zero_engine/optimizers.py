"""Which torch optimizer steps the shards: made from the config, or the user's own.

Owns the names of the config, and the check that an optimizer is elementwise: only then may it
be given pieces of parameters (those of `whole` know how to ask for the rest). The optimizer is made
on the user's parameters, so that groups, defaults and schedulers come out as in plain torch;
`zero_optimizer` then puts the shards in their place.

Called by `assembly`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from zero_engine.config import OptimizerConfig
from zero_engine.config.nearest import check_params
from zero_engine.errors import ConfigError
from zero_engine.lamb import Lamb
from zero_engine.lion import Lion
from zero_engine.muon import Muon, mark
from zero_engine.torch_muon import TORCH_MUON
from zero_engine.whole import LooksAtWhole

_log = logging.getLogger(__name__)

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]

BY_NAME: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.AdamW,  # as in DeepSpeed, unless "adam_w_mode" is false
    "adamw": torch.optim.AdamW,
    "lamb": Lamb,
    "lion": Lion,
    "muon": Muon,  # DeepSpeed's, which is not torch's: it has an Adam for what are no matrices
    # Every other optimizer of torch.optim goes by its own name.
    **{
        name.lower(): cls
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and name not in ("Adam", "AdamW", "Muon", "Optimizer")
    },
}

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)

_ELEMENTWISE_ONE = "an elementwise one, such as AdamW"
_FEW_STATES = (
    'one that keeps little state on each rank: "muon" or "lion" of the config, or AdamW with '
    "offload_optimizer"
)
_OURS = 'that of the config, which works on shards: {{"type": "{}"}}'

# These look at whole matrices or at all parameters at once: pieces would change the result.
_INSTEAD = {
    _FEW_STATES: "Adafactor CAME GaLoreAdafactor GaLoreAdamW GaLoreAdamW8bit",
    _OURS.format("lamb"): "FusedLAMB FusedMixedPrecisionLamb LAMB Lamb",
    _OURS.format("muon"): (
        "Muon MuonWithAuxAdam SingleDeviceMuon SingleDeviceMuonWithAuxAdam SOAP Shampoo"
    ),
    _ELEMENTWISE_ONE: (
        "DAdaptAdaGrad DAdaptAdam DAdaptAdan DAdaptLion DAdaptSGD FusedNovoGrad LARS LBFGS Lars "
        "NovoGrad Prodigy SparseAdam"
    ),
}
_NOT_ELEMENTWISE = {name: remedy for remedy, names in _INSTEAD.items() for name in names.split()}
"""Class -> what to use instead."""


def make_optimizer(
    given: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None,
    config: OptimizerConfig | None,
    parameters: Parameters,
    model: nn.Module,
) -> torch.optim.Optimizer | None:
    """The optimizer of this run: the user's object or callable, else the config's, else None.

    Muon of the config marks the matrices of `model`, where the script has not.

    Raises:
        ConfigError: Two were given, or one that cannot work on shards.
    """
    if given is not None and config is not None:
        raise ConfigError("an optimizer is given both to initialize() and in the config; keep one")
    if isinstance(given, torch.optim.Optimizer):
        optimizer = given
    elif given is not None:
        optimizer = given(parameters)
    elif config is not None:
        if config.type.lower() == "muon":
            mark(model)
        optimizer = _from_config(config, parameters)
    else:
        return None
    _check(type(optimizer))
    return optimizer


def _from_config(config: OptimizerConfig, parameters: Parameters) -> torch.optim.Optimizer:
    name = config.type.lower()
    cls = BY_NAME.get(name)
    if cls is None:
        known = ", ".join(sorted(name for name, cls in BY_NAME.items() if not _remedy(cls)))
        raise ConfigError(f"optimizer.type: {config.type!r} is unknown; known: {known}")
    _check(cls)
    params = {key: value for key, value in config.params.items() if value != "auto"}
    if name in ("adam", "adamw"):
        cls, params = _adam(name, params)
    if params.pop("max_grad_norm", 0):
        raise ConfigError("optimizer.params.max_grad_norm: write it as gradient_clipping")
    if cls in _FUSED and not params.keys() & {"foreach", "fused"}:
        params["fused"] = True
    check_params("optimizer.params", cls, params)
    try:
        return cls(parameters, **params)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.params of {config.type}: {error}") from error


def _adam(name: str, params: dict[str, Any]) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """DeepSpeed's Adam in torch's terms: both names are AdamW, without decay by default."""
    params.pop("torch_adam", None)  # DeepSpeed's choice of kernel; there is one here
    if not params.pop("bias_correction", True):
        raise ConfigError("optimizer.params.bias_correction: Adam is always corrected here")
    decoupled = params.pop("adam_w_mode", True) or name == "adamw"
    return torch.optim.AdamW if decoupled else torch.optim.Adam, {"weight_decay": 0.0, **params}


def _remedy(cls: type) -> str:
    """What to use in the place of an optimizer that cannot work on shards; empty if it can."""
    knows_how = cls is TORCH_MUON or issubclass(cls, LooksAtWhole)
    return "" if knows_how else _NOT_ELEMENTWISE.get(cls.__name__, "")


def _check(cls: type) -> None:
    if remedy := _remedy(cls):
        raise ConfigError(
            f"optimizer {cls.__name__} needs whole parameters and cannot work on shards; use "
            f"{remedy}"
        )


def trained_groups(optimizer: torch.optim.Optimizer | None, model: nn.Module) -> dict[int, int]:
    """id(parameter) -> param group, for what the optimizer trains.

    A parameter in a group that does not require gradients is left alone, as in plain torch. One
    that requires gradients but is in no group stops requiring them.

    Raises:
        ConfigError: A group holds a parameter that is not the model's.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    groups: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups if optimizer else ()):
        for position, param in enumerate(group["params"]):
            if id(param) not in names:
                raise ConfigError(
                    f"optimizer: parameter {position} of param group {index}, shape "
                    f"{tuple(param.shape)}, is not one of the model's; make the optimizer from "
                    "the parameters of the model that is given to initialize()"
                )
            if param.requires_grad:
                groups[id(param)] = index
    _freeze_the_rest(model, groups)
    return groups


def _freeze_the_rest(model: nn.Module, groups: dict[int, int]) -> None:
    stray = [(n, p) for n, p in model.named_parameters() if p.requires_grad and id(p) not in groups]
    for _, param in stray:
        param.requires_grad_(False)
    if stray and groups:
        _log.warning(
            "%d parameters are in no param group and will not be trained: %s",
            len(stray),
            ", ".join(name for name, _ in stray[:5]) + (", ..." if len(stray) > 5 else ""),
        )
