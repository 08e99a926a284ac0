"""Rank 0's part of a save: check the votes, then publish the checkpoint as a whole, or nothing."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from zero_checkpoint.consensus import Record
from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.place import Place, exists
from zero_checkpoint.files.storage import REMOVED, Disk
from zero_checkpoint.format.fragments import COLUMNS, check_cover, from_lists
from zero_checkpoint.format.layout import FileLayout
from zero_checkpoint.format.manifest import MANIFEST, NAME, FileRecord, Manifest, encode, file_name
from zero_checkpoint.format.pieces import State
from zero_checkpoint.format.table import canonical, table_of, uncollected
from zero_checkpoint.loading.candidates import LATEST
from zero_contract import worker as contract
from zero_contract.beside import heir_of
from zero_contract.errors import CommitRefused

_log = logging.getLogger(__name__)

Fence = Callable[[str], None]
"""Called with the manifest's digest; raises CommitRefused if this worker is stale."""
_TEMPORARY = ".tmp"
_OWN = tuple(name for name in COLUMNS if name != "file")
"""The columns of fragments in a rank's vote, in this order."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """On rank 0, a checkpoint whose files are durable, its manifest too, under a temporary name."""

    directory: Place
    manifest: Manifest
    digest: str
    """Of the manifest."""
    disk: Disk


class NotPublished(CommitRefused):
    """Etcd does not take a checkpoint for now: its files are written, and stay."""

    def __init__(self, message: str, directory: str, attempt: Attempt | None) -> None:
        super().__init__(message, passing=True)
        self.directory = directory
        """Where its files are."""
        self.attempt = attempt
        """To publish it later; on rank 0 alone."""


class Unsure(Exception):
    """The rename of the manifest failed: it may have happened, or may still happen."""

    def __init__(self, failure: OSError) -> None:
        super().__init__(str(failure))
        self.failure = failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The part of a manifest that the ranks agreed on before they wrote: no vote changes it."""

    step: int
    round: int
    nonce: str
    tag: str
    block_bytes: int
    runs: tuple[str, ...] = ()
    """See `ownership.runs`; rank 0's count."""


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
def assemble(state: State, header: Header, votes: Sequence[Record]) -> Manifest:
    """The manifest from the votes of all ranks, in rank order.

    Raises:
        CheckpointError: A rank did not vote, failed, or describes another model; or the
            fragments do not cover every tensor exactly once.
    """
    table, files = fingerprint(state), []
    for rank, vote in enumerate(votes):
        if problem := vote.get("problem"):
            raise CheckpointError(str(problem))
        if vote["table"] != table:
            raise CheckpointError(
                f"rank {rank} has another table of tensors or ties than rank 0; "
                "build the same model, in the same order, on every rank"
            )
        digests = np.frombuffer(vote["xxh3_64"], dtype=np.uint64)
        size_bytes, data_offset = vote["size_bytes"], vote["data_offset"]
        files.append(FileRecord(file_name(rank), size_bytes, data_offset, digests))
    own = [np.frombuffer(vote["fragments"], np.int64).reshape(len(_OWN), -1) for vote in votes]
    columns = dict(zip(_OWN, np.concatenate(own, axis=1), strict=True))
    columns["file"] = np.repeat(np.arange(len(own)), [each.shape[1] for each in own])
    fragments, tensors = from_lists(columns), table_of(state.tensors)
    gap = check_cover(fragments, tensors.numels, tensors.name)
    if gap is not None:
        raise CheckpointError(f"the ranks do not own every element exactly once: {gap}")
    return Manifest(
        step=header.step,
        round=header.round,
        nonce=header.nonce,
        tag=header.tag,
        world=len(votes),
        tensors=tensors,
        aliases=dict(state.aliases),
        files=tuple(files),
        fragments=fragments,
        meta=state.meta,
        block_bytes=header.block_bytes,
        runs=header.runs,
    )


def prepare(directory: Place, manifest: Manifest, disk: Disk) -> Attempt:
    """Write the manifest under a temporary name.

    Raises:
        CheckpointError: A file is not visible from here.
        FileExistsError: Another manifest is there.
        OSError: An operation failed.
    """
    # A root that is not shared would otherwise show only at a load, when it is too late.
    sizes = {path.name: path.stat().st_size for path in directory.iterdir()}
    for rank, file in enumerate(manifest.files):
        path, size = directory / file.name, sizes.get(file.name)
        if size != file.size_bytes:
            raise CheckpointError(
                f"rank {rank} wrote {file.size_bytes} bytes to {path}, rank 0 sees {size}; "
                f"put {directory.parent} on storage that all nodes share"
            )
    text, digest = encode(manifest)
    disk.write_whole(directory / (MANIFEST + _TEMPORARY), text)
    return Attempt(directory, manifest, digest, disk)


def publish(attempt: Attempt, fence: Fence | None) -> None:
    """Commit: when this returns, the checkpoint is the newest and survives a power cut.

    Raises:
        CommitRefused: The fence refused, before anything is visible.
        FileExistsError: Another manifest is there, or a tombstone: this attempt was swept.
        OSError: An operation failed before the commit.
        Unsure: An operation failed at the commit, or right after it.
    """
    directory, disk = attempt.directory, attempt.disk
    if fence is not None:
        fence(attempt.digest)
        # A store whose quorum was lost may come back when other nodes have begun a new one from
        # the newest checkpoint here: what it grants is the job's no more (`store.succession`).
        store = os.environ.get(contract.ENV_STORE)
        if store and exists(heir := directory.parent / heir_of(store)):
            raise CommitRefused(f"the job has a new store, which {heir} names")
    # From here on the checkpoint may exist: all that it names is durable, and the fence has agreed.
    final = directory / MANIFEST
    temporary = final.with_name(MANIFEST + _TEMPORARY)
    try:
        disk.publish(temporary, final)
        disk.sync_directory(directory)
        disk.sync_directory(directory.parent)  # the directory itself is new there
    except FileExistsError:  # a store has refused it, so it surely did not happen
        raise
    except OSError as error:
        raise Unsure(error) from error
    # Hints for people and other tools, which no load reads: the checkpoint exists without them.
    hint, tag = directory.parent / LATEST, attempt.manifest.tag
    temporary = hint.with_name(LATEST + _TEMPORARY)
    try:
        if not attempt.manifest.is_aside:
            disk.remove(temporary)  # of a process that died here
            disk.write_whole(temporary, directory.name.encode() + b"\n")
            disk.publish(temporary, hint, replace=True)
        # A tag can be a name beside the checkpoints, where DeepSpeed's scripts look for it.
        if not (tag.startswith((".", LATEST, REMOVED)) or NAME.fullmatch(tag) or "/" in tag):
            hint = hint.with_name(tag)
            disk.link(hint, directory.name)
    except (OSError, ValueError) as error:  # no file can have such a name
        _log.warning("%s is saved, but %s could not be updated: %s", directory, hint, error)


def withdraw(directory: Place, disk: Disk, *, committing: bool = False) -> bool:
    """Remove a failed attempt; files that cannot be removed are left for a later sweep.

    Returns whether it surely has no manifest, and will have none; if not, all files are left.
    `committing`: the rename of the manifest had begun.
    """
    if committing and disk.publishes_late:
        return False
    # The manifest first, durably: it may have got its final name before a later fsync failed, and a
    # manifest must never outlive a file that it names.
    try:
        disk.remove(directory / MANIFEST)
        disk.sync_directory(directory)
    except OSError as error:
        _log.warning("the failed checkpoint %s could not be removed: %s", directory, error)
        return not committing
    disk.remove_tree(directory)
    return True
