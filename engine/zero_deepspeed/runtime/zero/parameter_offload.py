"""DeepSpeed's handle on the hooks that gather and release the parameters of stage 3."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

__all__ = ["DeepSpeedZeRoOffload"]


class DeepSpeedZeRoOffload:
    """`optimizer.parameter_offload` at stage 3, without hooks and parameters."""

    # Libraries that generate in the middle of training (TRL, OpenRLHF) gather all parameters,
    # remove the hooks that would release them, and register these again. Here gathered parameters
    # stay until their context ends, whatever runs inside: there is nothing to remove.

    def __init__(self) -> None:
        self.module = _Empty()
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Do nothing: no hook was removed."""

    _register_hooks_recursively = _register_deepspeed_module
    """The name before DeepSpeed 0.16.4."""


class _Empty(nn.Module):
    def ds_external_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return ()
