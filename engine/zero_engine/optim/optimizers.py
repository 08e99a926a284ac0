"""Which torch optimizer steps the shards: made from the config, or the user's own.

An optimizer is given pieces of parameters if it is elementwise or a `LooksAtWhole`; whole ones, on
the rank that owns each, if it looks at them one by one. It is made on the user's parameters, so
that groups, defaults and schedulers come out as in plain torch; `zero_optimizer` then puts what the
rank steps in their place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from zero_contract.errors import ConfigError
from zero_contract.sections import unquoted
from zero_engine.config import OptimizerConfig
from zero_engine.config.nearest import check_params
from zero_engine.layout import OptimizerFacts
from zero_engine.optim.lamb import Lamb
from zero_engine.optim.lion import Lion
from zero_engine.optim.muon import TORCH_MUON, Muon, mark
from zero_engine.optim.whole import LooksAtWhole
from zero_engine.sharding.segments import divided_keys

_log = logging.getLogger(__name__)

_FROZEN = WeakTensorKeyDictionary()
"""The parameters that require no gradients because an engine does not train them."""

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]

BY_NAME: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.AdamW,  # as in DeepSpeed, unless "adam_w_mode" is false
    "adamw": torch.optim.AdamW,
    "lamb": Lamb,
    "lion": Lion,
    "muon": Muon,  # DeepSpeed's and not torch's: it has an Adam for what are no matrices
    # Every other optimizer of torch.optim goes by its own name.
    **{
        name.lower(): cls
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and name not in ("Adam", "AdamW", "Muon", "Optimizer")
    },
}

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)

NEEDS_WHOLE = "needs_whole_parameters"
"""The attribute of an optimizer or its class: whether it must be given whole parameters."""
_SAY_SO = f", or, if yours looks at one parameter at a time, set its attribute {NEEDS_WHOLE} = True"
_ELEMENTWISE = (
    f"; if what it does to an element depends on that element alone, set {NEEDS_WHOLE} = False: "
    "then it steps shards, which takes less memory and can be offloaded"
)
_KNOWN = ("torch.optim.", "zero_engine.", "zero_deepspeed.")
"""The packages of whose optimizers it is known whether they are elementwise."""

_AT_ONCE = "looks at all parameters at once", "an elementwise one, such as AdamW"
_OURS = 'that of the config, which works on shards: {{"type": "{}"}}'
_LITTLE_STATE = '"adafactor", "muon" or "lion" of the config, which keep little state on each rank'
_REFUSED = {
    _AT_ONCE: "DAdaptAdaGrad DAdaptAdam DAdaptAdan DAdaptLion DAdaptSGD Prodigy",
    ("calls the model again within a step, and sees all parameters as one vector", _AT_ONCE[1]): (
        "LBFGS"
    ),
    ("takes sparse gradients, and those here are dense", "Adam or AdamW"): "SparseAdam",
    (_AT_ONCE[0], _OURS.format("lamb")): "FusedLAMB FusedMixedPrecisionLamb LAMB Lamb",
    ("divides parameters among the ranks by itself", _OURS.format("muon")): "Muon MuonWithAuxAdam",
    ("keeps what no checkpoint can hold", _LITTLE_STATE): (
        "GaLoreAdafactor GaLoreAdamW GaLoreAdamW8bit FusedNovoGrad"
    ),
}
_WHY_NOT = {name: why for why, names in _REFUSED.items() for name in names.split()}
"""Class -> why it cannot be used, and what to use instead."""


def make_optimizer(
    given: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None,
    config: OptimizerConfig | None,
    parameters: Parameters | None,
    model: nn.Module,
) -> torch.optim.Optimizer | None:
    """The optimizer of this run: the user's object or callable, else the config's, else None.

    Without `parameters` the optimizer gets all parameters of the model that require gradients.
    For Muon of the config the matrices of `model` are marked, unless the script has marked them.

    Raises:
        ConfigError: The optimizer cannot work on shards, or the config's section is wrong.
    """
    if given is not None and config is not None and dist.get_rank() == 0:
        _log.warning(
            "the optimizer given to initialize() is used, as in DeepSpeed, and not the config's "
            '"optimizer": {"type": "%s"}; remove one of the two',
            config.type,
        )
    if parameters is None:
        parameters = [p for p in model.parameters() if p.requires_grad]
    if isinstance(given, torch.optim.Optimizer):
        optimizer = given
    elif given is not None and not callable(given):
        raise ConfigError(
            f"optimizer: {type(given).__name__} is no torch.optim.Optimizer, nor a callable that "
            "makes one; give the optimizer that it wraps, or one whose class inherits from it"
        )
    elif given is not None:
        optimizer = given(parameters)
    elif config is not None:
        if config.type.lower() == "muon":
            mark(model)
        optimizer = _from_config(config, parameters)
    else:
        return None
    _check(type(optimizer), getattr(optimizer, NEEDS_WHOLE, None))
    _check_alone(optimizer)
    return optimizer


_ONE_BIT = {"onebitadam": "Adam", "onebitlamb": "Lamb", "zerooneadam": "Adam"}
"""An optimizer of DeepSpeed's that compresses its traffic -> the one to set instead."""

_OF_MUP = {"muadam": "MuAdam", "muadamw": "MuAdamW", "musgd": "MuSGD"}
"""Optimizers of muP: torch's, with learning rates that follow the shapes of weights."""


def _from_config(config: OptimizerConfig, parameters: Parameters) -> torch.optim.Optimizer:
    name = config.type.lower()
    cls = BY_NAME.get(name)
    if name in _ONE_BIT:
        raise ConfigError(
            f"optimizer.type: {config.type!r} does not exist here, and DeepSpeed has removed it; "
            f'set {_ONE_BIT[name]!r}, and "zero_quantized_gradients" to send less'
        )
    if name in _OF_MUP:
        try:
            of_mup: Callable[..., Any] = getattr(import_module("mup"), _OF_MUP[name])
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"optimizer.type: {_OF_MUP[name]!r} is of the package mup: pip install mup"
            ) from error
        return _made(config, of_mup, parameters, _params(config))
    if cls is None:
        known = ", ".join(sorted(name for name, cls in BY_NAME.items() if _why_not(cls) is None))
        raise ConfigError(f"optimizer.type: {config.type!r} is unknown; known: {known}")
    _check(cls)
    params = _params(config)
    if name in ("adam", "adamw"):
        # DeepSpeed's Adam in torch's terms: both names are AdamW. Its own has no decay by default;
        # with "torch_adam" it makes torch's class as it is.
        own = {} if params.pop("torch_adam", False) else {"weight_decay": 0.0}
        if not params.pop("bias_correction", True):
            raise ConfigError("optimizer.params.bias_correction: Adam is always corrected here")
        decoupled = params.pop("adam_w_mode", True) or name == "adamw"
        cls = torch.optim.AdamW if decoupled else torch.optim.Adam
        params = own | params
    if params.pop("max_grad_norm", 0):
        raise ConfigError("optimizer.params.max_grad_norm: write it as gradient_clipping")
    # One kernel for each segment, on CPUs as well; torch refuses it beside foreach.
    if cls in _FUSED and not params.keys() & {"foreach", "fused"}:
        params["fused"] = True
    return _made(config, cls, parameters, check_params("optimizer.params", cls, params))


def _params(config: OptimizerConfig) -> dict[str, Any]:
    return {key: unquoted(value) for key, value in config.params.items() if value != "auto"}


def _made(
    config: OptimizerConfig,
    make: Callable[..., torch.optim.Optimizer],
    parameters: Parameters,
    params: Mapping[str, Any],
) -> torch.optim.Optimizer:
    try:
        return make(parameters, **params)
    except (TypeError, ValueError, AssertionError) as error:  # mup asserts that shapes are known
        raise ConfigError(f"optimizer.params of {config.type}: {error}") from error


def needs_whole(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is to be given whole parameters, on the ranks that own them."""
    says = getattr(optimizer, NEEDS_WHOLE, None)
    if says is not None:
        return bool(says)
    # An unknown one is: an elementwise one gives the same bits on whole parameters as on shards.
    return not _is_known(type(optimizer)) or isinstance(optimizer, torch.optim.Adafactor)


def _is_known(cls: type[torch.optim.Optimizer]) -> bool:
    return cls.step.__module__.startswith(_KNOWN)  # a subclass may have inherited it


def describe(optimizer: torch.optim.Optimizer) -> OptimizerFacts:
    """The facts of an optimizer that the layout depends on."""
    declared = getattr(optimizer, NEEDS_WHOLE, None) is not None or _is_known(type(optimizer))
    whole, advice = needs_whole(optimizer), "" if declared else _ELEMENTWISE
    return OptimizerFacts(name=type(optimizer).__name__, whole=whole, advice=advice)


def _why_not(cls: type) -> tuple[str, str] | None:
    """The reason why an optimizer cannot be used, and what to use instead; None: it can be used."""
    knows_how = cls is TORCH_MUON or issubclass(cls, LooksAtWhole)
    return None if knows_how else _WHY_NOT.get(cls.__name__)


def _check(cls: type, says: Any = None) -> None:
    """Refuse an optimizer that is known not to work; `says` is its own NEEDS_WHOLE, if set."""
    why_not = _why_not(cls)
    if why_not is None or says is not None:
        return
    others = "" if cls.__module__.startswith("torch.") else _SAY_SO
    raise ConfigError(f"optimizer {cls.__name__} {why_not[0]}; use {why_not[1]}{others}")


def _check_alone(optimizer: torch.optim.Optimizer) -> None:
    """Refuse one that steps within the backward, or by another optimizer."""
    name = type(optimizer).__name__
    if type(optimizer).step.__module__ == torch.optim.Optimizer.__module__:
        raise ConfigError(
            f"optimizer {name} has no step(): it acts within the backward, as LOMO does, where the "
            f"gradients of other ranks are not there; use {_LITTLE_STATE}"
        )
    for attribute, value in vars(optimizer).items():
        parts = value.values() if isinstance(value, dict) else value
        for part in parts if isinstance(value, dict | list | tuple) else [value]:
            if isinstance(part, torch.optim.Optimizer) and part.state is not optimizer.state:
                raise ConfigError(
                    f"optimizer {name} steps by another one, {type(part).__name__}, in its "
                    f"attribute {attribute}: no checkpoint would have the state of that, and the "
                    "engine divides the parameters of the outer one alone; give that one itself"
                )


def trained_groups(optimizer: torch.optim.Optimizer | None, model: nn.Module) -> dict[int, int]:
    """id(parameter) -> param group, for what the optimizer trains.

    Parameters that require gradients and are in no group stop requiring them.

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
            if param.requires_grad:  # else it is left alone, as in plain torch
                groups[id(param)] = index
    stray = [(n, p) for n, p in model.named_parameters() if p.requires_grad and id(p) not in groups]
    for _, param in stray:
        # Nobody takes their gradients, which would add up in `.grad`.
        _FROZEN[param.requires_grad_(False)] = True
    if stray and groups:
        _log.warning(
            "%d parameters are in no param group and will not be trained: %s",
            len(stray),
            ", ".join(name for name, _ in stray[:5]) + (", ..." if len(stray) > 5 else ""),
        )
    return groups


def check_stepped_alike(
    optimizer: torch.optim.Optimizer, model: nn.Module, groups: Mapping[int, int]
) -> None:
    """Check that an optimizer can go on with shards: what it has for a param group fits all of it.

    Raises:
        ConfigError: It has stepped some of the parameters of a group, or not equally often.
    """
    of_group: dict[int, tuple[str, Mapping[str, Any]]] = {}
    divided = [divided_keys(group["params"], optimizer.state) for group in optimizer.param_groups]
    for name, param in model.named_parameters():
        if (index := groups.get(id(param))) is None:
            continue
        own: Mapping[str, Any] = optimizer.state.get(param, {})
        other, others = of_group.setdefault(index, (name, own))
        for key in sorted(own.keys() | others.keys()):
            here, there = own.get(key), others.get(key)
            if key in divided[index]:  # any values, but of one kind
                here, there = getattr(here, "dtype", None), getattr(there, "dtype", None)
            shapes = {getattr(each, "shape", None) for each in (here, there)}
            if len(shapes) > 1 or not bool(torch.as_tensor(here == there).all()):
                raise ConfigError(
                    f"optimizer: the parameters of param group {index} were not stepped alike: "
                    f"{key} is {here} for {name}, and {there} for {other}; the engine steps a "
                    "group as one: give it only what was stepped equally often, or begin afresh "
                    "with optimizer.state.clear()"
                )


def thaw(model: nn.Module) -> None:
    """Let parameters that an earlier engine did not train require gradients again."""
    for param in model.parameters():
        if _FROZEN.pop(param, False):
            param.requires_grad_()
