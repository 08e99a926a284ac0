"""DeepSpeed's handle on the hooks that gather and release the parameters of stage 3.

Libraries that generate in the middle of training (TRL, OpenRLHF) gather all parameters, take the
hooks away that would release them module by module, and put them back. Here what a script has
gathered stays until its context ends, whatever runs inside: there is nothing to take away.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

__all__ = ["DeepSpeedZeRoOffload"]


class DeepSpeedZeRoOffload:
    """`optimizer.parameter_offload` at stage 3, with no hooks and no parameters of its own."""

    def __init__(self) -> None:
        self.module = _Empty()
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Nothing to put back."""

    _register_hooks_recursively = _register_deepspeed_module
    """Before DeepSpeed 0.16.4."""


class _Empty(nn.Module):
    def ds_external_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return ()
