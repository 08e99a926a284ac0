"""What an import has found, and two plain sources: a torch state_dict, a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.state.client_state import check_elements
from zero_checkpoint.state.torch_state import is_buffer
from zero_checkpoint.tools.conversion.export import INDEX
from zero_checkpoint.tools.conversion.pickles import load_torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A model, and perhaps its optimizer, read from somewhere else."""

    params: Mapping[str, Tensor]
    """Whole, by name; tied ones under one name only."""
    buffers: Mapping[str, Tensor]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Tied parameters: other name -> name in `params`."""
    moments: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """Optimizer key -> parameter -> one value per element."""
    groups: Sequence[Mapping[str, Any]] = ()
    """Param groups in the engine's form: `params`, `hyperparameters`, `state`."""
    frozen: frozenset[str] = frozenset()
    """Parameters that are not trained."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Those of the engine's counters that the source has."""
    client: Mapping[str, Any] = field(default_factory=dict)
    """State that the script had saved beside the model, as `client_state.pack` writes it."""
    left_out: Sequence[str] = ()
    """Names of the source that a checkpoint has no place for."""


def read_torch(path: Path, *, allow_pickle: bool, key: str, buffers: Sequence[str]) -> Foreign:
    """A state_dict in one file, under a key such as `model`, "": the file is the state_dict.

    `buffers` are patterns of further names that are buffers.

    Raises:
        CheckpointError: The file holds no state_dict under this key.
    """
    whole = content = load_torch(path, str(path), allow_pickle=allow_pickle)
    for part in key.split(".") if key else ():
        if not (isinstance(content, Mapping) and part in content):
            keys = ", ".join(map(str, content)) if isinstance(content, Mapping) else "none"
            raise CheckpointError(f"{path}: there is no key {part!r}; keys are: {keys}")
        content = content[part]
    if not isinstance(content, Mapping) or not content:
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not a state_dict")
    odd = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if odd:
        raise CheckpointError(
            f"{path}: {odd[0]!r} is not a tensor; if the state_dict is below one of "
            f"{', '.join(odd[:5])}, name it with --key"
        )
    beside = [name for name in whole if name != key.partition(".")[0]] if key else []
    return replace(sort_out(content, buffers), left_out=[str(name) for name in beside])


def read_hf(path: Path, *, buffers: Sequence[str]) -> Foreign:
    """The safetensors of a Hugging Face directory, or one safetensors file.

    Raises:
        CheckpointError: There is no safetensors file, one is missing, or one is damaged.
    """
    index = path / INDEX
    if path.is_file():
        files = [path]
    elif index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            # A stranger's: it may name any file of this machine.
            outside = any(Path(name).name != name for name in names)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index}: no index of safetensors: {error}") from error
        if outside:
            raise CheckpointError(f"{index}: names files outside of its directory")
        files = [path / name for name in names]
    elif not path.is_dir():
        raise CheckpointError(f"{path}: there is no such file or directory")
    elif not (files := sorted(path.glob("*.safetensors"))):
        raise CheckpointError(
            f"{path}: no safetensors in it; convert pytorch_model.bin with --from torch"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except FileNotFoundError:
            raise CheckpointError(f"{file}: the index names it, and it is missing") from None
        except SafetensorError as error:
            raise CheckpointError(f"{file}: no safetensors, or damaged: {error}") from error
    return sort_out(tensors, buffers)


def sort_out(tensors: Mapping[str, Tensor], buffers: Sequence[str]) -> Foreign:
    """Sort the tensors of a state_dict into parameters, buffers and ties.

    Raises:
        CheckpointError: A tensor is sparse, or on the meta device, or the like.
    """
    params: dict[str, Tensor] = {}
    others: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, data in tensors.items():
        check_elements(data, name)
        # Neither source says which tensors are buffers: `is_buffer` knows torch's own, the user
        # names others.
        if is_buffer(name, data.dtype, buffers):
            others[name] = data
            continue
        place = (
            data.untyped_storage().data_ptr(),
            data.storage_offset(),
            data.shape,
            data.stride(),
        )
        # Empty tensors have one address, and are not tied by it.
        first = seen.setdefault(place, name) if data.numel() else name
        if first == name:
            params[name] = data
        else:
            aliases[name] = first
    return Foreign(params=params, buffers=others, aliases=aliases)
