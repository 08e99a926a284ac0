"""Checkpoints of other libraries in the place of ours, and the command that imports each."""

from __future__ import annotations

from contextlib import suppress
from fnmatch import fnmatchcase

from zero_checkpoint.files.place import Place
from zero_checkpoint.loading.candidates import LATEST, is_ours


def hint(path: Place) -> str:
    """The foreign format that a directory seems to hold, and the command that imports it; or ""."""
    others = (each for each in directories(path) if not is_ours(each.resolve().name))
    names: dict[Place, list[str]] = {}
    for each in (path, *sorted(others, key=str)):
        names[each] = []
        # It is only a hint: what this user may not read is passed over.
        with suppress(PermissionError):
            names[each] = [inner.name for inner in each.iterdir()]
    for kind, (pattern, what) in _FOREIGN.items():
        for directory, there in names.items():
            if any(fnmatchcase(name, pattern) for name in there):
                # The `latest` of DeepSpeed's own directory names the one in which the files are.
                whole = path if kind == _DEEPSPEED and LATEST in names[path] else directory
                which = "it" if whole == path else whole.name
                return f"; {which} looks like {what}: zero-ckpt import {whole} DIR --from {kind}"
    return ""


_DEEPSPEED = "deepspeed"
_FOREIGN = {
    "dcp": (".metadata", "a checkpoint of torch.distributed.checkpoint"),
    _DEEPSPEED: ("*_model_states.pt", "a checkpoint of DeepSpeed"),
    "hf": ("*.safetensors*", "a Hugging Face model"),
}
"""Format of an import -> the pattern of its files, and its name; the richest format comes first."""


def directories(path: Place) -> list[Place]:
    """The directories in a directory."""
    try:
        return [inner for inner in path.iterdir() if inner.is_dir()]
    except PermissionError:  # a directory beside the checkpoints that this user may not read
        return []
