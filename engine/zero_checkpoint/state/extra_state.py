"""The state of modules beside parameters and buffers: `get_extra_state`, such as scales of FP8.

Must always hold: every module that has extra state gets back what rank 0's had, under its name in
the user's module; which modules have none in the checkpoint is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from zero_checkpoint.state.client_state import pack, unpack

KEY = "extra_state"
"""In the engine's record of a run."""
Named = Callable[[str], str]
"""From a module's name to its name in the user's module."""


def extra_state(model: nn.Module, named: Named = str) -> dict[str, Any]:
    """The extra state of all modules, as JSON, as of now.

    Raises:
        CheckpointError: A module's cannot be restored; names it.
    """
    return {
        name: pack(module.get_extra_state(), f"the extra state of {name or 'the model'}")
        for name, module in _modules(model, named)
    }


def restore_extra_state(
    model: nn.Module, saved: Mapping[str, Any] | None, named: Named = str
) -> list[str]:
    """Give the modules what `extra_state` has returned; returns the names of those without it."""
    absent = []
    for name, module in _modules(model, named):
        if saved is not None and name in saved:
            module.set_extra_state(unpack(saved[name]))
        else:
            absent.append(name or "the model")
    return absent


def _modules(model: nn.Module, named: Named) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield named(name), module
