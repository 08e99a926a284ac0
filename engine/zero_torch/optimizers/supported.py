"""Which optimizers and schedulers can be protected, and how they step.

Owns the list of torch's optimizers that step each element by itself. Must always hold: an optimizer
whose bits would depend on where the elements lie is refused by name, before the first step.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from zero_contract.errors import ConfigError

_BY_ELEMENT = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Optimizers whose step of an element depends on that element and on numbers alone."""
_STEPS = frozenset(cls.step.__module__ for cls in _BY_ELEMENT)

_NO_STEP = {
    "LBFGS": "calls the model again within a step, which cannot be held until the last micro-batch",
    "SparseAdam": "takes sparse gradients, and those of zero_torch are dense",
}
"""Optimizers that cannot step, whatever wraps the model, and why."""

NO_CLOSURE = (
    "optimizer.step(closure) computes the loss again, which cannot be held until the last micro-"
    "batch of a step; call backward() first, and optimizer.step() without a closure"
)
NEEDS_WHOLE = "needs_whole_parameters"
"""The attribute of an optimizer or its class: whether its step looks at whole parameters."""


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that steps: of one that a library has prepared, the one inside.

    Raises:
        ConfigError: There is none inside whose step can be held, or whose state can be saved.
    """
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise ConfigError(
            "ZeroRedundancyOptimizer divides its state among the ranks by itself, and a checkpoint "
            "would have that of one rank; call fully_shard(model) and use the optimizer inside"
        )
    if type(optimizer).__name__ == "Adafactor":
        raise ConfigError(
            "Adafactor keeps state in other shapes than its parameters, which the checkpoints of "
            "zero_torch cannot hold; use another optimizer, or train with zero_engine, which can"
        )
    if "_optimizer_step_pre_hooks" in vars(optimizer):
        return optimizer
    kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    inner: Any = getattr(optimizer, "optimizer", None)
    if not isinstance(inner, torch.optim.Optimizer):
        raise ConfigError(f"{kind} is no optimizer of torch; give protect the optimizer inside")
    if getattr(optimizer, "scaler", None) is not None:
        raise ConfigError(
            f"{kind} has a loss scaler of its own, which steps behind zero_torch's back; train in "
            "bf16, or give protect the optimizer inside, and a scaler"
        )
    return unwrapped(inner)


def check_members(optimizer: torch.optim.Optimizer, trained: Mapping[str, nn.Parameter]) -> None:
    """Check that an optimizer steps this model.

    Raises:
        ConfigError: It has other parameters.
    """
    names = {parameter: name for name, parameter in trained.items()}
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    kind = type(optimizer).__name__
    if foreign := sum(p.requires_grad and p not in names for p in stepped):
        raise ConfigError(
            f"{kind} has {foreign} parameters that are not the model's; make the optimizer from "
            "model.parameters() after fully_shard(model), which replaces them"
        )
    if absent := sorted(names[p] for p in names.keys() - set(stepped)):
        raise ConfigError(
            f"{absent[0]} is trained and {kind} does not have it; give it to the optimizer, or "
            "set requires_grad=False"
        )


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has the step of one of torch's that step each element by itself."""
    return type(optimizer).step.__module__ in _STEPS  # a subclass may have inherited it


def check_step(optimizer: torch.optim.Optimizer, *, sharded: bool) -> None:
    """Check that the bits of a step do not depend on the world size.

    `sharded`: a rank has a part of each parameter.

    Raises:
        ConfigError: They would, or it cannot be known; or the optimizer cannot step at all.
    """
    kind = type(optimizer).__name__
    if kind in _NO_STEP:
        raise ConfigError(f"{kind} {_NO_STEP[kind]}; use Adam or AdamW")
    needs_whole = getattr(optimizer, NEEDS_WHOLE, None)
    if not sharded or is_elementwise(optimizer) or needs_whole is False:
        return
    if needs_whole or kind in vars(torch.optim):
        raise ConfigError(
            f"{kind} looks at whole parameters, of which FSDP2 gives each rank a part: the bits "
            "would depend on the world size; wrap the model in DistributedDataParallel, or train "
            "with zero_engine, which gives it whole parameters at every stage"
        )
    raise ConfigError(
        f"{kind} is none of torch's optimizers, and FSDP2 gives each rank a part of each "
        "parameter: if what it does to an element depends on that element alone, set its attribute "
        f"{NEEDS_WHOLE} = False; otherwise wrap the model in DistributedDataParallel"
    )


def check_scheduler(scheduler: Any) -> None:
    """Check that a scheduler can be stepped once for each step of the optimizer.

    Raises:
        ConfigError: It is one that a library has prepared, which steps once for each rank.
    """
    if not isinstance(scheduler, LRScheduler) and hasattr(scheduler, "scheduler"):
        raise ConfigError(
            f"{type(scheduler).__module__}.{type(scheduler).__name__} steps the scheduler inside, "
            "and how often depends on the world size; give protect the one inside, and do not let "
            "a library prepare it"
        )


def takes_no_metric(scheduler: Any) -> bool:
    """Whether a scheduler can be stepped without an argument, unlike ReduceLROnPlateau."""
    parameters = inspect.signature(scheduler.step).parameters.values()
    # A metric has no default; the `epoch` of torch's other schedulers has one.
    named = (each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD)
    return all(each.default is not each.empty for each in named)


def step_without_fusion(optimizer: torch.optim.Optimizer) -> bool:
    """Let an optimizer step with kernels that round each element alike; whether it was fused."""
    # A fused kernel rounds the end of a tensor differently, and the world size decides where shards
    # end. DDP has no shards, and must have the bits of FSDP2 all the same. What param groups that
    # are added later have comes from the defaults.
    fused = [g for g in (*optimizer.param_groups, optimizer.defaults) if g.get("fused")]
    for group in fused:
        group["fused"], group["foreach"] = False, True
    if fused:  # GradScaler asks for it: a fused kernel unscales by itself
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    return bool(fused)
