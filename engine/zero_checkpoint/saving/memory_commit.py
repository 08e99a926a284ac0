"""Commits a checkpoint in the memory of the nodes: the same votes as on disk, no file written.

    all ranks                                       vote: the address of their node's memory
    rank 0 names the checkpoint                     verdict: the name, and all addresses
    each rank seals its image, hashes it, and
    sends it to the replica peers                   vote: size, digests, fragments; or its error
    rank 0 assembles the manifest, ASKS THE FENCE,
    and keeps the manifest                          verdict: the manifest, or why not
    each rank keeps the manifest and frees older
    checkpoints

A process that dies at any line leaves the checkpoint before, or this one, whole.

Source of the idea: Gemini (SOSP 2023) and NVRx keep checkpoints in the memory of peers; theirs load
at the same world size only.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from zero_checkpoint.consensus import COORDINATOR, Record, StoreConsensus
from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.writer import BlockHasher
from zero_checkpoint.format.layout import block_bytes_for
from zero_checkpoint.format.manifest import FileRecord, directory_name, encode, file_name
from zero_checkpoint.format.pieces import State
from zero_checkpoint.loading import ownership
from zero_checkpoint.memory.node import MemoryNode, home_of, keep_manifest, seal
from zero_checkpoint.memory.peers import ReplicaPeers, replica_peers
from zero_checkpoint.saving.commit import generation, problem, raise_problem, vote
from zero_checkpoint.saving.publish import Fence, Header, assemble, vote_for
from zero_checkpoint.saving.staging import FrozenImage, OnPart

Newest = Callable[[], tuple[int, int] | None]
"""Returns (round, step) of the newest existing checkpoint; called on rank 0."""


class MemoryOff(Exception):
    """In-memory checkpoints are not possible in this group; the message says where and why."""


class NotKept(CheckpointError):
    """A rank failed, so no rank has committed: the checkpoint before is still the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySave:
    """One checkpoint to be made. `state.meta` must not change any more."""

    root: object
    """The directory of the run's checkpoints on disk; rank 0's counts for all ranks."""
    place: int = 0
    """Of the engine, see `home_of`."""
    state: State
    image: FrozenImage | None
    """A snapshot of the pieces; None if this rank has none."""
    problem: str
    """Why there is no image, which switches in-memory checkpoints off for all ranks."""
    step: int
    tag: str
    round: int
    fence: Fence | None
    newest: Newest
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A checkpoint that all ranks have committed."""

    name: str
    poorer: tuple[str, ...]
    """The missing copies and their causes, from all ranks."""


def commit_in_memory(
    save: MemorySave,
    consensus: StoreConsensus,
    node: MemoryNode | None,
    peers: ReplicaPeers,
    on_part: OnPart = lambda part, size_bytes, took_s: None,
) -> Kept:
    """Commit on all ranks or on none; every rank calls it.

    A rank's write, see `commit.save`, is its seal, the hashes, and the copies.

    Raises:
        MemoryOff: A rank cannot take part, now or later. On every rank.
        CommitRefused: The fence refused. On every rank.
        NotKept: A rank failed. On every rank.
        CheckpointError: No verdict came, and the outcome is unknown.
        PeerLost: The store of the votes is gone.
    """
    joining: Record = {"off": save.problem}
    if save.image is not None and node is not None:
        joining = {"address": node.address}
    opened = consensus.ask(joining, partial(_open, save))
    if "off" in opened:
        raise MemoryOff(opened["off"])
    raise_problem(opened, failure=NotKept)
    assert node is not None, "or this rank's own vote would have switched it off"
    name, home = directory_name(save.step, opened["round"], opened["nonce"]), opened["home"]
    directory = node.directory_of(home, name)
    verdict = vote(
        consensus,
        partial(_seal_own, save, consensus.rank, node, peers, f"{home}/{name}", opened["roster"]),
        partial(_judge, save, opened, directory),
        where=directory / file_name(consensus.rank),
        on_part=on_part,
    )
    # The same on all ranks: nobody will load it, and the next one needs its memory.
    if "problem" in verdict:
        node.forget(home, [name])
    raise_problem(verdict, failure=NotKept)
    with suppress(OSError):  # rank 0 has it, and a manifest is read from anywhere
        keep_manifest(directory, verdict["manifest"])
    # Not before: until then the checkpoint before is the newest that is whole.
    node.forget_before(home, name)
    return Kept(name=name, poorer=tuple(verdict["poorer"]))


def _open(save: MemorySave, votes: list[Record]) -> Record:
    """Rank 0: the name of the checkpoint; or why all is switched off, or which rank is missing."""
    try:
        for rank, vote in enumerate(votes):
            if "problem" in vote:
                return vote
            if "off" in vote:
                return {"off": f"rank {rank}: {vote['off']}"}
        return {
            "round": generation(save.round, save.step, save.newest()),
            "nonce": secrets.token_hex(2),
            "home": home_of(save.root, save.place),
            "roster": [vote["address"] for vote in votes],
        }
    except Exception as error:
        return problem(f"rank {COORDINATOR}", error)


def _seal_own(
    save: MemorySave,
    rank: int,
    node: MemoryNode,
    peers: ReplicaPeers,
    place: str,
    roster: Sequence[str],
) -> Record:
    """Seal, hash and copy this rank's image; returns the vote."""
    image, name = save.image, file_name(rank)
    assert image is not None
    path = f"{place}/{name}"
    assert image.path is not None, "an in-memory checkpoint is in shared staging memory"
    # Linked before this rank votes: the image then outlives its worker.
    seal(image.path, node.directory / path)
    block_bytes = block_bytes_for(save.state.tensors)
    hasher = BlockHasher(block_bytes)
    for chunk in image.chunks():
        hasher.update(chunk)
    size, head = image.layout.size_bytes, len(image.layout.head)
    file = FileRecord(name, size, head, hasher.digests())
    # A copy that a peer did not take makes the checkpoint poorer, not invalid: it still survives
    # the death of every worker.
    poorer = [
        f"rank {rank}: {why}"
        for address in replica_peers(roster, node.address, save.replicas)
        if (why := peers.send(address, path, image, file, block_bytes))
    ]
    return {**vote_for(save.state, image.layout, file), "poorer": poorer}


def _judge(save: MemorySave, opened: Record, directory: Path, votes: list[Record]) -> Record:
    """Rank 0: the manifest if all votes are good and the fence agrees, or the problem."""
    header = Header(
        tag=save.tag,
        step=save.step,
        block_bytes=block_bytes_for(save.state.tensors),
        round=opened["round"],
        nonce=opened["nonce"],
        runs=ownership.runs(),
    )
    try:
        text, digest = encode(assemble(save.state, header, votes))
        if save.fence is not None:
            save.fence(digest)
        keep_manifest(directory, text)  # at once: one node with the manifest is enough
    except CheckpointError as error:
        return {"problem": str(error)}  # it names the rank
    except Exception as error:
        return problem(f"rank {COORDINATOR}", error)
    poorer = [why for vote in votes for why in vote["poorer"]]
    return {"manifest": text, "poorer": poorer}
