"""Exports of the trained model as plain files and dictionaries, for other tools.

An export has every parameter and persistent buffer under its own name, frozen and tied ones
included, at every stage; a file appears whole under its name or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from torch import Tensor, nn

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.model_files import ModelFile, SafetensorsFile, Table, TorchFile
from zero_checkpoint.files.storage import DISK


def frozen(module: nn.Module) -> frozenset[str]:
    """All names of the parameters that are not trained."""
    named = module.named_parameters(remove_duplicate=False)
    return frozenset(name for name, param in named if not param.requires_grad)


def write_weights(
    weights: Iterable[tuple[str, Tensor]], table: Table, ties: Mapping[str, str], path: Path
) -> str:
    """Write the weights of the table: as safetensors with that suffix, else with torch.save.

    `ties` are further names of tensors in the table. Returns why the file could not be written, and
    is unchanged; empty if it was written.
    """
    # Beside the file, so that the rename stays within one file system.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            _fill(file, weights, table, ties, path)
            os.fsync(file.fileno())
        partial.replace(path)
        DISK.sync_directory(path.parent)
    except (OSError, RuntimeError, CheckpointError) as error:  # torch.save raises the second
        with suppress(OSError):
            partial.unlink()
        return f"{path} was not written: {error}"
    return ""


def _fill(
    file: BinaryIO,
    weights: Iterable[tuple[str, Tensor]],
    table: Table,
    ties: Mapping[str, str],
    path: Path,
) -> None:
    # A torch file knows ties; in safetensors each name of a tensor has separate bytes.
    names = {name: [name, *(n for n, first in ties.items() if first == name)] for name in table}
    out: ModelFile
    if path.suffix == ".safetensors":
        out = SafetensorsFile(file, {n: table[name] for name, all_ in names.items() for n in all_})
    else:
        out = TorchFile(file, path.parent, table, ties)
        names = {name: [name] for name in table}
    for name, value in weights:
        for each in names.get(name, ()):
            out.put(each, value)
        del value  # before the next unit is gathered
    out.finish()
