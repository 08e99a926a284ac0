"""What is kept between forward and backward: inputs, the results of some operators, or everything.

Owns `policy` and `cpu_checkpointing` of the config, for modules that it names and for functions of
the script. No bit changes. Source: DeepSpeed's activation checkpointing, torch.utils.checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from zero_contract.errors import ConfigError
from zero_engine.config.schema import ActivationCheckpointing, Policy

_FORWARD = "forward"
_ATEN = torch.ops.aten
_KEPT = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN.baddbmm.default,
        _ATEN.convolution.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
    }
)
"""The operators whose results "selective" keeps: they cost the most to compute."""


def run(
    settings: ActivationCheckpointing, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a function, and keep of it what the settings say."""
    if settings.policy == Policy.OFFLOAD:
        with _in_host_memory():
            return function(*args, **kwargs)
    selective = settings.policy == Policy.SELECTIVE
    contexts = partial(create_selective_checkpoint_contexts, _choose)
    with _in_host_memory() if settings.cpu_checkpointing else nullcontext():
        # A forward that runs again draws the same random numbers: torch keeps their state.
        return checkpoint(
            function,
            *args,
            use_reentrant=False,
            context_fn=contexts if selective else noop_context_fn,
            **kwargs,
        )


def _choose(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _in_host_memory() -> AbstractContextManager[None]:
    """A context in which what autograd keeps rests in host memory."""
    return saved_tensors_hooks(_to_host, lambda kept: kept[1].to(kept[0], non_blocking=True))


def goes_to_host(tensor: Tensor) -> bool:
    """Whether autograd's copy of a tensor is moved: parameters and views of them stay."""
    owner = tensor if tensor._base is None else tensor._base
    # At stage 3 the memory of parameters is given back between uses: a copy would keep them whole.
    return tensor.device.type != "cpu" and not isinstance(owner, nn.Parameter)


def _to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
    if not goes_to_host(tensor):
        return tensor.device, tensor
    # torch keeps pinned memory until its copies have ended, so nothing waits here.
    kept = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return tensor.device, kept.copy_(tensor, non_blocking=True)


# ---- modules that the config names ----


class _Forward:
    """A module's forward, in its place; it stays that of the module when it is copied."""

    def __init__(self, settings: ActivationCheckpointing, forward: Callable[..., Any]) -> None:
        self.settings = settings
        self.forward = forward
        update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run(self.settings, self.forward, *args, **kwargs)


def apply(model: nn.Module, settings: ActivationCheckpointing) -> None:
    """Treat the activations of the modules that the settings name; an engine before is undone.

    Raises:
        ConfigError: No module has such a class or name.
    """
    for module in model.modules():
        if isinstance(vars(module).get(_FORWARD), _Forward):
            del module.forward
    for module in chosen(model, settings.modules):
        module.forward = _Forward(settings, module.forward)


def chosen(model: nn.Module, rules: tuple[str, ...]) -> list[nn.Module]:
    """The modules that rules name, without those inside of others.

    Raises:
        ConfigError: A rule names none.
    """
    named = dict(model.named_modules())
    found: set[str] = set()
    for rule in rules:
        fitting = {
            name
            for name, each in named.items()
            if type(each).__name__ == rule or fnmatchcase(name, rule)
        }
        if not fitting:
            classes = ", ".join(sorted({type(each).__name__ for each in named.values()}))
            raise ConfigError(
                f"activation_checkpointing.modules: no module of the model has the class or the "
                f"name {rule!r}; its classes are {classes}"
            )
        found |= fitting
    # What is inside of a module is treated with it.
    outermost = set()
    for name in found:
        parts = name.split(".") if name else []
        if not any(".".join(parts[:depth]) in found for depth in range(len(parts))):
            outermost.add(name)
    return [each for name, each in named.items() if name in outermost]
