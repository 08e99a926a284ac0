"""From what a user typed to a checkpoint: a root (its newest), one directory, or `DIR@TAG`.

Called by `cli`; everything behind it gets a `Candidate`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from fnmatch import fnmatchcase

from zero_engine.checkpoint.candidates import (
    WAS_COMMITTED,
    Candidate,
    Rejected,
    Why,
    examine,
    scan,
)
from zero_engine.checkpoint.format.manifest import MANIFEST
from zero_engine.checkpoint.format.parse import read_manifest
from zero_engine.checkpoint.place import Place, place
from zero_engine.errors import CheckpointError

_log = logging.getLogger(__name__)


def one(name: str) -> Candidate:
    """As `newest`; what is passed over is said."""
    chosen, passed_over = newest(name)
    for entry in passed_over:
        _log.warning("passed over: %s", entry.reason)
    return chosen


def newest(name: str) -> tuple[Candidate, list[Rejected]]:
    """The checkpoint that `name` means; a quarantined one only if it is named itself.

    Returns:
        It, and the newer ones that were committed and cannot be used.

    Raises:
        CheckpointError: There is none, or it is unusable; says why and what there is instead.
        OSError: It could not be read.
    """
    path, tag = split(name)
    if is_checkpoint(path):
        return _named(path, tag), []
    candidates: list[Candidate] = []
    rejected: list[Rejected] = []
    for entry in scan(path):
        if isinstance(entry, Rejected):
            rejected.append(entry)
        elif tag in (None, entry.manifest.tag):
            return entry, [each for each in rejected if each.why in WAS_COMMITTED]
        else:
            candidates.append(entry)
    raise CheckpointError(_nothing(path, tag, candidates, rejected))


def root(name: str) -> Place:
    """The existing directory of checkpoints that `name` means.

    Raises:
        CheckpointError: It is no directory, or is a single checkpoint.
    """
    path = place(name)
    if not path.is_dir():
        raise CheckpointError(f"{path}: {absence(path)}; give a directory of checkpoints")
    if is_checkpoint(path):
        raise CheckpointError(f"{path} is one checkpoint; give the directory above: {path.parent}")
    return path


def split(name: str) -> tuple[Place, str | None]:
    """The directory and the tag; a directory whose own name contains `@` wins.

    Raises:
        CheckpointError: There is no such directory.
    """
    path, tag = place(name), None
    if not path.is_dir() and "@" in name:
        directory, _, tag = name.rpartition("@")
        path = place(directory)
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: {absence(path)}; give a directory of checkpoints, one checkpoint in it, or "
            "DIR@TAG"
        )
    return path, tag


def absence(path: Place) -> str:
    """Why a path that is no directory is none."""
    return "this is a file" if path.exists() else "there is no such directory"


def is_checkpoint(path: Place) -> bool:
    """Whether a directory is, or was meant to be, one checkpoint."""
    entry = examine(path.resolve())
    return isinstance(entry, Candidate) or entry.why is not Why.OTHER or (path / MANIFEST).exists()


def _named(path: Place, tag: str | None) -> Candidate:
    if tag is not None:
        raise CheckpointError(f"{path} is one checkpoint; leave out @{tag}, or give {path.parent}")
    path = path.resolve()
    try:
        return Candidate(path, read_manifest(path / MANIFEST))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: no {MANIFEST}: it is being saved, or the save died; it was never a checkpoint"
        ) from None


def hint(path: Place) -> str:
    """What a directory without a checkpoint of ours seems to hold instead, and the command."""
    there = [inner.name for inner in path.iterdir()]
    for kind, (pattern, what) in _FOREIGN.items():
        if any(fnmatchcase(name, pattern) for name in there):
            return f"; it looks like {what}: zero-ckpt import {path} DIR --from {kind}"
    return ""


_FOREIGN = {
    "dcp": (".metadata", "a checkpoint of torch.distributed.checkpoint"),
    "deepspeed": ("*_model_states.pt", "a checkpoint of DeepSpeed"),
    "hf": ("*.safetensors*", "a Hugging Face model"),
}
"""Kind of an import -> a file that tells it, and what it is called."""


def _nothing(
    path: Place,
    tag: str | None,
    candidates: Sequence[Candidate],
    rejected: Sequence[Rejected],
) -> str:
    unusable = [entry.reason for entry in rejected if entry.why is not Why.OTHER]
    also = f"; not usable: {'; '.join(unusable)}" if unusable else ""
    if not candidates:
        return f"{path}: there is no usable checkpoint here{also}{hint(path)}"
    tags = ", ".join(dict.fromkeys(c.manifest.tag for c in candidates)) or "none"
    return f"{path}: no checkpoint is tagged {tag!r}; tags there are: {tags}{also}"
