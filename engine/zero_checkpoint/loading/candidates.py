"""Which checkpoints there are: the directories of a root, newest first, each usable or not.

`latest` is never consulted: it is a hint for people and other tools. Nothing is ever deleted here.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.local_file import patiently
from zero_checkpoint.files.object_disk import disk_of
from zero_checkpoint.files.place import Place, exists, is_dir, place
from zero_checkpoint.files.storage import REMOVED
from zero_checkpoint.format.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    NAME,
    QUARANTINE,
    Manifest,
    age,
)
from zero_checkpoint.format.parse import (
    ManifestError,
    NewerFormatError,
    RemovedError,
    parse,
)

_log = logging.getLogger(__name__)

LATEST = "latest"


class Why(StrEnum):
    """The reason why a directory is no candidate."""

    OTHER = "other"
    """Its name is not that of a checkpoint."""
    UNCOMMITTED = "uncommitted"
    """No manifest: being written, or left by a save that died."""
    DAMAGED = "damaged"
    """The manifest itself is damaged, hostile, or of another directory."""
    NEWER = "newer"
    """Written by a release whose format this one cannot read."""
    REMOVED = "removed"
    """A tombstone is in the manifest's place: a deletion is not complete."""
    QUARANTINED = "quarantined"
    """Found damaged by an earlier load."""


WAS_COMMITTED = frozenset({Why.DAMAGED, Why.NEWER, Why.QUARANTINED})
"""These directories were checkpoints: starting from scratch would silently lose them."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A committed checkpoint."""

    path: Place
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Rejected:
    """A directory that is no candidate; `reason` is a sentence that names it."""

    path: Place
    why: Why
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """The directories under a root."""

    candidates: tuple[Candidate, ...]
    """Newest first."""
    rejected: tuple[Rejected, ...]


def find(root: str | os.PathLike[str] | Place) -> Found:
    """All checkpoints under `root`, newest first, and why the other directories are none.

    Raises:
        CheckpointError: The root is a file, or one checkpoint.
        OSError: The root or a manifest could not be read, for a reason other than damage. A
            root that does not exist has no checkpoints.
    """
    seen = list(scan(place(root)))
    return Found(
        tuple(entry for entry in seen if isinstance(entry, Candidate)),
        tuple(entry for entry in seen if isinstance(entry, Rejected)),
    )


def scan(root: Place) -> Iterator[Candidate | Rejected]:
    """The entries of `find`, one at a time: a manifest is read when its entry is requested."""
    for path in _newest_first(root):
        yield examine(path)


def _newest_first(root: Place) -> list[Place]:
    # A run given a checkpoint, or a file, would find no checkpoints in it, and start from scratch.
    real = root.resolve()
    if NAME.fullmatch(real.name):
        raise CheckpointError(
            f"{root} is one checkpoint; give the directory above, {real.parent}, and its name as "
            "the tag"
        )
    if exists(real) and not is_dir(real):
        raise CheckpointError(f"{root}: this is a file; give a directory of checkpoints")
    entries = root.iterdir() if is_dir(root) else ()
    # A link is a tag that leads to a checkpoint, whose directory is listed as well.
    directories = [
        path
        for path in entries
        if is_dir(path) and not (isinstance(path, Path) and path.is_symlink())
    ]
    # By names: a manifest is read only when its checkpoint is looked at.
    return sorted(directories, key=_age, reverse=True)


def examine(path: Place) -> Candidate | Rejected:
    """One directory as a candidate, or why it is none; raises OSError as `find`."""
    if not NAME.fullmatch(path.name):
        return Rejected(path, Why.OTHER, f"{path}: not the name of a checkpoint")
    if exists(path / QUARANTINE):
        try:
            marked = (path / QUARANTINE).read_text(errors="replace").partition("\n")[0]
        except OSError as error:  # it is marked all the same, for an unknown reason
            marked = str(error)
        text = f"{path}: quarantined by an earlier load: {marked}"
        return Rejected(path, Why.QUARANTINED, text)
    try:
        return Candidate(path, read_manifest(path / MANIFEST))
    except FileNotFoundError:
        why, reason = Why.UNCOMMITTED, f"{path}: no {MANIFEST}, never committed"
    except RemovedError as error:
        why, reason = Why.REMOVED, str(error)
    except NewerFormatError as error:
        why, reason = Why.NEWER, str(error)
    except ManifestError as error:
        why, reason = Why.DAMAGED, str(error)
    except OSError as error:
        if error.errno != errno.EIO:
            raise  # a missing permission, a stalled mount: no damage of the checkpoint
        why, reason = Why.DAMAGED, str(error)
    return Rejected(path, why, reason)


def is_ours(name: str) -> bool:
    """Whether a directory has the name of a checkpoint, or of one that is being deleted."""
    return NAME.fullmatch(name.removeprefix(REMOVED)) is not None


def committed(root: Place) -> Iterator[Place]:
    """The directories with a manifest and no quarantine, newest first, by name alone."""
    for path in _newest_first(root):
        if NAME.fullmatch(path.name) and exists(path / MANIFEST) and not exists(path / QUARANTINE):
            yield path


def newest_committed(root: Place) -> tuple[int, int] | None:
    """(round, step) of the newest of `committed`."""
    newest = next(committed(root), None)
    return age(newest.name) if newest is not None else None


def quarantine(path: Place, reason: str) -> None:
    """Mark a damaged checkpoint, so that no later load chooses it; never raises."""
    disk = disk_of(path)
    text = f"{reason}\nDelete this file to let the checkpoint be loaded again.\n"
    try:
        disk.write_whole(path / QUARANTINE, text.encode())
        disk.sync_directory(path)
    except OSError as error:  # such as of a read-only root, where nothing can be marked
        _log.warning("could not quarantine %s: %s", path, error)


def _age(path: Place) -> tuple[int, int, int]:
    """(round, step, time of the commit); less for any other directory."""
    if not NAME.fullmatch(path.name):
        return (-1, -1, 0)
    # Two tags of one step share round and step: the later commit is the newer one.
    try:
        committed_ns = (path / MANIFEST).stat().st_mtime_ns
    except OSError:  # not committed, or it is being deleted: `examine` says which
        committed_ns = 0
    return (*age(path.name), committed_ns)


def read_manifest(path: Place) -> Manifest:
    """The manifest at `path`, wholly validated.

    Raises:
        ManifestError: The manifest is damaged, hostile or too new; the message says where.
        OSError: The file could not be read (FileNotFoundError: the checkpoint is not committed).
    """
    text = patiently(_manifest_text, path)
    try:
        manifest = parse(text)
    except ManifestError as error:
        raise type(error)(f"{path}: {error}") from error
    if manifest.directory != path.parent.name:
        raise ManifestError(
            f"{path}: written for the directory {manifest.directory!r}; "
            "move it back there to use it"
        )
    return manifest


def _manifest_text(path: Place) -> bytes:
    """The bytes of a manifest; refuses files that cannot be one. Raises as `read_manifest`."""
    # Before it is read: what claims to be a manifest may be larger than the memory.
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise ManifestError(f"{path}: larger than {MAX_MANIFEST_BYTES} bytes; not a manifest")
    if isinstance(path, Path) and not path.is_file():  # a pipe or a device may have no end
        raise ManifestError(f"{path}: no regular file; not a manifest")
    return path.read_bytes()
