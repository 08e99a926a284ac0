"""Exports of the trained model as plain files and dictionaries, for other tools.

Must always hold: an export has every parameter and persistent buffer under its own name, frozen and
tied ones included, at every stage; a file appears whole under its name or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn


def without_frozen(whole: Mapping[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """A state_dict without the parameters that are not trained; buffers stay."""
    named = module.named_parameters(remove_duplicate=False)
    frozen = {name for name, param in named if not param.requires_grad}
    return {name: value for name, value in whole.items() if name not in frozen}


def write_weights(whole: Mapping[str, Tensor], path: Path) -> str:
    """Write a state_dict: as safetensors with that suffix, else with torch.save.

    Returns:
        Why the file could not be written, and is unchanged; empty if it was written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            save_file({name: value.contiguous().clone() for name, value in whole.items()}, partial)
        else:
            torch.save(dict(whole), partial)
        _make_durable(partial)
        partial.replace(path)
        _make_durable(path.parent)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch.save raises the second
        with suppress(OSError):
            partial.unlink()
        return f"{path} was not written: {error}"
    return ""


def _make_durable(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
