"""The model of a checkpoint for others: one torch file, or a directory for Hugging Face.

Only parameters and buffers are exported, under every name that they have. The output appears under
its final name whole or not at all, and never replaces an existing file.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.model_files import SafetensorsFile, TorchFile
from zero_checkpoint.files.storage import DISK
from zero_checkpoint.format.pieces import BUFFER, PARAM, TensorId, TensorInfo
from zero_checkpoint.format.table import grouped, numel
from zero_checkpoint.loading.candidates import Candidate
from zero_checkpoint.tools.tensors import read_tensors
from zero_checkpoint.tools.verify import Progress
from zero_contract.owned_dir import DirectoryTaken, Taken, claim, clear

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_COMPANIONS = (
    CONFIG,
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "preprocessor_config.json",
)
"""Files of a Hugging Face directory beside the weights."""
_DTYPE_KEYS = ("dtype", "torch_dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSelection:
    """Tensors to write: the name that each gets, and the dtype of those that hold reals."""

    names: Mapping[str, TensorId]
    dtype: torch.dtype | None = None
    """None keeps the stored dtype, the highest precision there is."""

    def convert(self, data: Tensor) -> Tensor:
        """A tensor as it is written."""
        real = self.dtype is not None and data.is_floating_point()
        return data.to(self.dtype) if real else data

    def written(self, info: TensorInfo) -> tuple[torch.dtype, torch.Size]:
        """The dtype and the shape of a tensor as it is written."""
        real = self.dtype is not None and info.dtype.is_floating_point
        return (self.dtype if real else None) or info.dtype, torch.Size(info.shape)

    def size_bytes(self, info: TensorInfo) -> int:
        """The size of a tensor as it is written."""
        return numel(info) * self.written(info)[0].itemsize


def select(
    checkpoint: Candidate, *, dtype: torch.dtype | None = None, strip_prefix: str = ""
) -> ExportSelection:
    """All parameters and buffers of a model, tied names included.

    Floats become `dtype`; `strip_prefix` is taken off every name, for a model that was trained
    inside a wrapper.

    Raises:
        CheckpointError: A name does not begin with the prefix, or two names become one.
    """
    manifest = checkpoint.manifest
    stored = {t.fqn: t for t in manifest.tensors if t.kind in (PARAM, BUFFER)}
    if not stored:
        raise CheckpointError(f"{checkpoint.path}: there are no parameters in it")
    ties = {name: stored[to] for name, to in manifest.aliases.items() if to in stored}
    every = stored | ties
    for name in every:
        if not name.startswith(strip_prefix):
            raise CheckpointError(f"--strip-prefix {strip_prefix}: {name!r} does not begin with it")
    return ExportSelection(
        names={name.removeprefix(strip_prefix): tensor for name, tensor in every.items()},
        dtype=dtype,
    )


def read_state_dict(checkpoint: Candidate, selection: ExportSelection) -> dict[str, Tensor]:
    """The selected tensors on the CPU, by their names in the model; raises as `read_tensor`."""
    wanted = dict.fromkeys(selection.names.values())
    whole = {t: selection.convert(data) for t, data in read_tensors(checkpoint, wanted)}
    return {name: whole[tensor] for name, tensor in selection.names.items()}


def export_torch(
    checkpoint: Candidate,
    selection: ExportSelection,
    out: Path,
    progress: Progress = lambda _: None,
) -> list[Path]:
    """Write a plain state_dict, for `torch.load(out, weights_only=True)`; returns its files.

    One batch of tensors is in memory at a time, or one tensor; the disk needs room for two models.

    Raises:
        CheckpointError: `out` exists, or another export writes it.
        DamagedCheckpoint: A tensor is not what was saved; nothing is left behind.
        OSError: Reading or writing failed.
    """
    must_be_new(out)
    with workplace(out) as directory:
        first: dict[TensorId, str] = {}
        for name, tensor in selection.names.items():
            first.setdefault(tensor, name)
        # Tied names get one object: torch.save writes it once, torch.load ties it again.
        ties = {name: first[t] for name, t in selection.names.items() if first[t] != name}
        table = checkpoint.manifest.tensors
        header = {name: selection.written(table[tensor]) for tensor, name in first.items()}
        with (directory / out.name).open("xb") as file:
            whole = TorchFile(file, directory, header, ties)
            for tensor, data in read_tensors(checkpoint, first):
                whole.put(first[tensor], selection.convert(data))
                progress(data.numel() * data.element_size())
            with errors_of_libraries(out):
                whole.finish()
            DISK.sync(file)
        publish(directory / out.name, out)
    return [out]


def export_hf(
    checkpoint: Candidate,
    selection: ExportSelection,
    out: Path,
    *,
    shard_bytes: int,
    config: Path | None = None,
    progress: Progress = lambda _: None,
) -> list[Path]:
    """Write a directory that `from_pretrained` loads; returns its files.

    One batch of tensors is in memory at a time (`tensors.BATCH_BYTES`), or one tensor.

    A file holds at most `shard_bytes`, unless one tensor is larger. `config` has `config.json` (and
    a tokenizer) to copy; its dtype becomes that of the weights. `progress` is called with the bytes
    of each tensor read.

    Raises:
        CheckpointError: `out` exists, another export writes it, or there is no `config.json`.
        DamagedCheckpoint: A tensor is not what was saved; nothing is left behind.
        OSError: Reading or writing failed.
    """
    must_be_new(out)
    companions: list[Path] = []
    if config is not None:
        if not (config / CONFIG).is_file():
            raise CheckpointError(f"--hf-config {config}: there is no {CONFIG} in it")
        found = {path for pattern in _COMPANIONS for path in config.glob(pattern) if path.is_file()}
        companions = sorted(path for path in found if not path.name.endswith(".index.json"))
    with workplace(out) as directory:
        partial = directory / out.name
        partial.mkdir()
        _write_shards(checkpoint, selection, partial, shard_bytes, progress)
        for path in companions:
            shutil.copyfile(path, partial / path.name)
        if config is not None:
            _set_dtype(partial / CONFIG, checkpoint, selection)
        # Before the rename: a power cut must not leave the name with empty files behind it.
        for path in partial.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        DISK.sync_directory(partial)
        publish(partial, out)
    return sorted(out.iterdir())


def _write_shards(
    checkpoint: Candidate,
    selection: ExportSelection,
    directory: Path,
    shard_bytes: int,
    progress: Progress,
) -> None:
    table = checkpoint.manifest.tensors
    sizes = {name: selection.size_bytes(table[t]) for name, t in selection.names.items()}
    # Without a tensor there is one file as well, so that the directory can be loaded.
    shards = list(grouped(sizes, sizes.__getitem__, shard_bytes)) or [[]]
    where: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        path = directory / (file if len(shards) > 1 else "model.safetensors")
        by_tensor: dict[TensorId, list[str]] = {}
        for name in names:
            by_tensor.setdefault(selection.names[name], []).append(name)
            where[name] = path.name
        header = {name: selection.written(table[selection.names[name]]) for name in names}
        with path.open("xb") as target:
            shard = SafetensorsFile(target, header)
            for tensor, data in read_tensors(checkpoint, by_tensor):
                # A tied weight once per name: whether a reader ties it again depends on a config
                # that this tool does not understand.
                for name in by_tensor[tensor]:
                    shard.put(name, selection.convert(data))
                progress(data.numel() * data.element_size())
            shard.finish()
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


@contextmanager
def errors_of_libraries(path: Path) -> Iterator[None]:
    """Turn the errors that torch and safetensors raise for a full disk into CheckpointError."""
    try:
        yield
    except (RuntimeError, SafetensorError) as error:
        problem = str(error).splitlines()[0]
        raise CheckpointError(f"{path}: cannot be written: {problem}") from error


def must_be_new(out: Path) -> None:
    """Raise CheckpointError if something is at `out`."""
    if out.exists():
        raise CheckpointError(f"{out} is there already; remove it, or write somewhere else")


def publish(partial: Path, out: Path) -> None:
    """Give a finished export its name. Raises CheckpointError if the name is taken."""
    must_be_new(out)  # another process may have made it meanwhile
    DISK.publish(partial, out)
    DISK.sync_directory(out.parent)


def _set_dtype(path: Path, checkpoint: Candidate, selection: ExportSelection) -> None:
    """Write the weights' dtype into the config."""
    # `from_pretrained` builds the model in that dtype, and would round the weights to it.
    try:
        record: Any = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"--hf-config: {CONFIG} is no JSON: {error}") from error
    if not isinstance(record, dict):
        raise CheckpointError(
            f"--hf-config: {CONFIG} holds a {type(record).__name__}, not an object; give that of "
            "the model"
        )
    stored = {i.dtype for t, i in checkpoint.manifest.tensors.items() if t.kind == PARAM}
    dtype = selection.dtype or (stored.pop() if len(stored) == 1 else None)
    present = [key for key in _DTYPE_KEYS if key in record]
    for key in present if dtype is not None else ():
        record[key] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(record, indent=2) + "\n")


_SUFFIX = ".partial"
_WHY = {
    Taken.OWNER_LIVES: ": another export is writing here; wait for it, or write somewhere else",
    Taken.NO_LOCKS: " is there already, and this file system has no locks; if no export is "
    "writing there, remove it",
    Taken.OTHER_KERNEL: ": left by an export on another machine, or before this machine was "
    "restarted; if no export is writing there, remove it",
    Taken.NEVER_OWNED: " is there already, and not left by an export; remove it, or write "
    "elsewhere",
}


@contextmanager
def workplace(out: Path) -> Iterator[Path]:
    """An empty directory on the file system of `out`, for this process alone; removed at the end.

    Raises:
        CheckpointError: Another export writes there, the directory there was not made by an
            export, or the path goes through a file.
        OSError: The directory could not be made.
    """
    directory = out.with_name(out.name + _SUFFIX)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise CheckpointError(f"{out}: one of the directories in this path is a file") from None
    try:
        owned = claim(directory)
    except DirectoryTaken as taken:
        raise CheckpointError(f"{directory}{_WHY[taken.why]}") from None
    try:
        clear(directory)  # of what a dead export has left
        yield directory
    finally:
        owned.remove()
