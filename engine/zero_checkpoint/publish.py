"""Rank 0's part of a save: judge the votes, then make the checkpoint appear, or nothing.

Must always hold: `publish` renames only when every byte that the manifest names is durable and
visible from here, and after the fence has agreed; `withdraw` takes the manifest away before any
file that it names.

Called by `commit` on rank 0.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from zero_checkpoint.candidates import LATEST
from zero_checkpoint.consensus import Record
from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.place import Place
from zero_checkpoint.files.storage import REMOVED, Disk
from zero_checkpoint.format.fragments import COLUMNS, Fragments, check_cover, from_lists
from zero_checkpoint.format.layout import FileLayout
from zero_checkpoint.format.manifest import MANIFEST, FileRecord, Manifest, encode, file_name
from zero_checkpoint.format.pieces import State
from zero_checkpoint.format.table import canonical, table_of, uncollected

_log = logging.getLogger(__name__)

Fence = Callable[[str], None]
"""Told the manifest's digest; raises CommitRefused when this round may publish no more."""
_TEMPORARY = ".tmp"
_OWN = tuple(name for name in COLUMNS if name != "file")
"""The columns of fragments that a rank votes with, one after the other."""


class Unsure(Exception):
    """Something failed while the manifest was given its name: it may have it, or get it yet."""

    def __init__(self, failure: OSError) -> None:
        super().__init__(str(failure))
        self.failure = failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What the ranks agreed on before they wrote: the part of a manifest that no vote changes."""

    step: int
    round: int
    nonce: str
    tag: str
    block_bytes: int


@uncollected()
def vote_for(state: State, layout: FileLayout, file: FileRecord) -> Record:
    """The vote of a rank whose file is durable."""
    return {
        "table": fingerprint(state),
        "size_bytes": file.size_bytes,
        "data_offset": file.data_offset,
        "xxh3_64": file.digests.tobytes(),
        "fragments": np.stack([layout.columns[name] for name in _OWN]).tobytes(),
    }


def fingerprint(state: State) -> str:
    """Equal on two ranks if and only if their tables of tensors and their ties are."""
    described = table_of(state.tensors).digest + canonical(dict(state.aliases))
    return hashlib.sha256(described.encode()).hexdigest()


@uncollected()
def assemble(state: State, header: Header, votes: Sequence[Record | None]) -> Manifest:
    """The manifest out of the votes of all ranks, in rank order.

    Raises:
        CheckpointError: A rank did not vote, failed, or describes another model; or the
            fragments do not cover every tensor exactly once.
    """
    table = fingerprint(state)
    good = [_checked(rank, vote, table) for rank, vote in enumerate(votes)]
    return Manifest(
        step=header.step,
        round=header.round,
        nonce=header.nonce,
        tag=header.tag,
        world=len(votes),
        tensors=table_of(state.tensors),
        aliases=dict(state.aliases),
        files=tuple(_file_of(rank, vote) for rank, vote in enumerate(good)),
        fragments=_fragments_of(state, good),
        meta=state.meta,
        block_bytes=header.block_bytes,
    )


def _checked(rank: int, vote: Record | None, table: str) -> Record:
    if vote is None:
        raise CheckpointError(f"rank {rank} did not report in time: it has died or stalls")
    if problem := vote.get("problem"):
        raise CheckpointError(str(problem))
    if vote["table"] != table:
        raise CheckpointError(
            f"rank {rank} has another table of tensors or ties than rank 0; "
            "build the same model, in the same order, on every rank"
        )
    return vote


def _file_of(rank: int, vote: Record) -> FileRecord:
    digests = np.frombuffer(vote["xxh3_64"], dtype=np.uint64)
    return FileRecord(file_name(rank), vote["size_bytes"], vote["data_offset"], digests)


def _fragments_of(state: State, votes: Sequence[Record]) -> Fragments:
    own = [np.frombuffer(vote["fragments"], np.int64).reshape(len(_OWN), -1) for vote in votes]
    columns = dict(zip(_OWN, np.concatenate(own, axis=1), strict=True))
    columns["file"] = np.repeat(np.arange(len(own)), [each.shape[1] for each in own])
    fragments = from_lists(columns)
    table = table_of(state.tensors)
    gap = check_cover(fragments, table.numels, table.name)
    if gap is not None:
        raise CheckpointError(f"the ranks do not own every element exactly once: {gap}")
    return fragments


def publish(directory: Place, manifest: Manifest, fence: Fence | None, disk: Disk) -> None:
    """Commit: when this returns, the checkpoint is the newest and survives a power cut.

    Raises:
        CommitRefused: By the fence, before anything is visible.
        CheckpointError: A file is not visible from here.
        FileExistsError: Another manifest is there, or a tombstone: this attempt was swept.
        OSError: An operation failed before the commit.
        Unsure: One failed at the commit, or right after.
    """
    _check_visible(directory, manifest)
    text, digest = encode(manifest)
    final = directory / MANIFEST
    temporary = final.with_name(MANIFEST + _TEMPORARY)
    _write_whole(temporary, text, disk)
    if fence is not None:
        fence(digest)
    try:
        disk.publish(temporary, final)
        disk.sync_directory(directory)
        disk.sync_directory(directory.parent)
    except FileExistsError:
        raise
    except OSError as error:
        raise Unsure(error) from error
    _write_hints(directory, manifest.tag, disk)


def _check_visible(directory: Place, manifest: Manifest) -> None:
    """A root that is not shared would otherwise show only when it is too late."""
    sizes = {path.name: path.stat().st_size for path in directory.iterdir()}
    for rank, file in enumerate(manifest.files):
        path, size = directory / file.name, sizes.get(file.name)
        if size != file.size_bytes:
            raise CheckpointError(
                f"rank {rank} wrote {file.size_bytes} bytes to {path}, rank 0 sees {size}; "
                f"put {directory.parent} on storage that all nodes share"
            )


def _write_whole(path: Place, text: bytes, disk: Disk) -> None:
    with disk.create(path) as file:
        disk.write(file, text)
        disk.sync(file)


def _write_hints(directory: Place, tag: str, disk: Disk) -> None:
    """Name the newest checkpoint, and it by its tag, for people and other tools; no load asks."""
    hint = directory.parent / LATEST
    try:
        _write_latest(hint, directory.name, disk)
        if _can_stand_beside(tag):
            hint = hint.with_name(tag)
            disk.link(hint, directory.name)
    except OSError as error:
        _log.warning("%s is saved, but %s could not be updated: %s", directory, hint, error)


def _write_latest(hint: Place, name: str, disk: Disk) -> None:
    temporary = hint.with_name(LATEST + _TEMPORARY)
    disk.remove(temporary)
    _write_whole(temporary, name.encode() + b"\n", disk)
    disk.publish(temporary, hint, replace=True)


def _can_stand_beside(tag: str) -> bool:
    """Whether a tag can be a name beside the checkpoints, where DeepSpeed's scripts look for it."""
    ours = (".", LATEST, REMOVED, "step-")
    return not tag.startswith(ours) and "/" not in tag


def withdraw(directory: Place, disk: Disk, *, committing: bool = False) -> bool:
    """Remove a failed attempt; what cannot be removed is left for a later sweep.

    The manifest goes first, durably: it may have got its final name before a later fsync failed,
    and a manifest must never outlive a file that it names.

    Args:
        directory: Of the attempt.
        disk: File operations.
        committing: The manifest was on its way to its final name.

    Returns:
        Whether it surely has no manifest, and will have none; if not, everything is left.
    """
    if committing and disk.publishes_late:
        return False
    try:
        disk.remove(directory / MANIFEST)
        disk.sync_directory(directory)
    except OSError as error:
        _log.warning("the failed checkpoint %s could not be removed: %s", directory, error)
        return not committing
    disk.remove_tree(directory)
    return True
