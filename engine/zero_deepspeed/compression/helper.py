"""DeepSpeed's `deepspeed.compression.helper`: a submodule by its dotted name."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import nn

__all__ = ["recursive_getattr", "recursive_setattr"]


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """The submodule, or any other attribute, of a dotted name."""
    return attrgetter(module_name)(model)


def recursive_setattr(model: nn.Module, module_name: str, module: nn.Module) -> None:
    """Replace the submodule of a dotted name; before `initialize`."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)
