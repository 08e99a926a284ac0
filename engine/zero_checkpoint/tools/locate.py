"""From what a user typed to a checkpoint: a root (its newest), one directory, or `DIR@TAG`."""

from __future__ import annotations

import logging
from itertools import chain

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.place import Place, place
from zero_checkpoint.format.manifest import MANIFEST
from zero_checkpoint.loading.candidates import (
    WAS_COMMITTED,
    Candidate,
    Rejected,
    Why,
    examine,
    is_ours,
    read_manifest,
    scan,
)
from zero_checkpoint.loading.foreign import directories, hint

_log = logging.getLogger(__name__)


def one(name: str) -> Candidate:
    """The result of `newest`; logs a warning for each checkpoint that is passed over."""
    chosen, passed_over = newest(name)
    for entry in passed_over:
        _log.warning("passed over: %s", entry.reason)
    return chosen


def newest(name: str) -> tuple[Candidate, list[Rejected]]:
    """The checkpoint that `name` means; a quarantined one only if `name` is its own directory.

    Returns:
        The checkpoint, and the newer ones that were committed and cannot be used.

    Raises:
        CheckpointError: There is no such checkpoint, or it cannot be used; the message says why
            and names what there is instead.
        OSError: A manifest could not be read.
    """
    path, tag = split(name)
    if is_checkpoint(path):
        if tag is not None:
            raise CheckpointError(
                f"{path} is one checkpoint; leave out @{tag}, or give {path.parent}"
            )
        path = path.resolve()  # a tag is a link
        try:
            return Candidate(path, read_manifest(path / MANIFEST)), []
        except FileNotFoundError:
            raise CheckpointError(
                f"{path}: no {MANIFEST}: it is being saved, or the save died; it was never a "
                "checkpoint"
            ) from None
    candidates: list[Candidate] = []
    rejected: list[Rejected] = []
    for entry in chain.from_iterable(scan(each) for each in roots(path)):
        if isinstance(entry, Rejected):
            rejected.append(entry)
        elif tag == entry.manifest.tag or (tag is None and not entry.manifest.is_aside):
            return entry, [each for each in rejected if each.why in WAS_COMMITTED]
        else:
            candidates.append(entry)
    unusable = [entry.reason for entry in rejected if entry.why is not Why.OTHER]
    also = f"; not usable: {'; '.join(unusable)}" if unusable else ""
    if not candidates:
        remedy = hint(path) or ("" if also else _GIVE_THE_DIRECTORY)
        raise CheckpointError(f"{path}: there is no usable checkpoint here{also}{remedy}")
    tags = ", ".join(dict.fromkeys(c.manifest.tag for c in candidates)) or "none"
    if tag is None:
        raise CheckpointError(f"{path}: all were saved aside; name one of the tags: {tags}{also}")
    raise CheckpointError(f"{path}: no checkpoint is tagged {tag!r}; tags there are: {tags}{also}")


def root(name: str) -> Place:
    """The one directory of checkpoints that `name` means.

    Raises:
        CheckpointError: `name` is no directory, is a single checkpoint, or holds no checkpoints;
            the message names the remedy.
    """
    found = all_roots(name)
    if len(found) > 1:
        inner = ", ".join(each.name for each in found)
        raise CheckpointError(
            f"{found[0].parent}: the checkpoints are in directories in it; give one of: {inner}"
        )
    return found[0]


def all_roots(name: str) -> list[Place]:
    """The directories of checkpoints that `name` means, the newest first.

    Raises:
        CheckpointError: See `root`.
    """
    path = place(name)
    if not path.is_dir():
        directory, sign, _ = name.rpartition("@")
        if sign and place(directory).is_dir():
            raise CheckpointError(f"{name}: a tag names one checkpoint of many; give {directory}")
        raise CheckpointError(f"{path}: {absence(path)}; give a directory of checkpoints")
    if is_checkpoint(path):
        raise CheckpointError(f"{path} is one checkpoint; give the directory above: {path.parent}")
    found = roots(path)
    if not found:
        raise CheckpointError(
            f"{path}: there are no checkpoints here{hint(path) or _GIVE_THE_DIRECTORY}"
        )
    return found


_GIVE_THE_DIRECTORY = "; give the directory that save_checkpoint() was given, or the one above"


def roots(path: Place) -> list[Place]:
    """The directory itself if there are checkpoints in it; else its directories that hold some."""
    if _steps(path):
        return [path]
    # Libraries make a root for each save: the Trainer `checkpoint-10`, accelerate `checkpoint_0`.
    steps = {inner: _steps(inner) for inner in directories(path)}
    return sorted((i for i, found in steps.items() if found), key=lambda i: steps[i], reverse=True)


def _steps(path: Place) -> list[str]:
    """The names of the checkpoints in a directory, which begin with their steps; newest first."""
    return sorted((inner.name for inner in directories(path) if is_ours(inner.name)), reverse=True)


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
    # One that was renamed has a manifest, which names the directory that it was written for.
    return isinstance(entry, Candidate) or entry.why is not Why.OTHER or (path / MANIFEST).exists()
