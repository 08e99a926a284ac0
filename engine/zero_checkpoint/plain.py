"""Checkpoints of a plain `state_dict`-like structure, in two calls; for any torch script.

    zero_checkpoint.save("checkpoints", {"model": model.state_dict(), "epoch": 3}, step=100)
    found = zero_checkpoint.load("checkpoints")

A structure is dictionaries, lists and tuples of tensors and of values that `client_state` can
store. Its tensors become tensors of the universal format, named by the keys that lead to them
(`model.layer.weight`); the other values go into the manifest. In a process group every rank calls
both functions, with the part that it has; without a group, a process is alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_checkpoint.consensus import COORDINATOR, Record, StoreConsensus
from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.place import Place, place
from zero_checkpoint.format.dtypes import DTYPES, elements, name_of
from zero_checkpoint.format.manifest import Manifest
from zero_checkpoint.format.pieces import BUFFER, PARAM, Piece, State, TensorId, TensorInfo
from zero_checkpoint.loading import restore
from zero_checkpoint.saving import commit
from zero_checkpoint.saving.housekeeping import Keep, tidy
from zero_checkpoint.state.client_state import Stored, check_dense, pack, unpack
from zero_comm.worker.agent_link import current_round
from zero_comm.worker.distributed import group_store

UNKNOWN_RUN: Mapping[str, Any] = {
    "step": 0,
    "samples": 0,
    "skipped": 0,
    **dict.fromkeys(("microbatches", "micro_batch", "dataset_size", "seed", "world", "stage")),
    **dict.fromkeys(("dtype", "optimizer", "torch", "threads", "scheduler", "weight_hash")),
    "reduction": None,
}
"""The engine's record of its run in a checkpoint; None for values that only the engine knows."""
STRUCTURE = "state"
"""The key of the structure in `meta`."""


@dataclass(frozen=True, slots=True)
class Part:
    """Stands for a tensor of which this rank has a run of elements."""

    data: Tensor
    """Elements [start, start + data.numel()) of the whole tensor, flattened in row-major order."""
    start: int
    shape: tuple[int, ...]
    """Of the whole tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The result of `load`."""

    state: dict[str, Any]
    """The structure; of an engine's checkpoint, its parameters and buffers by name."""
    step: int
    tag: str
    path: Place


def save(
    root: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    step: int,
    tag: str | None = None,
    keep_last: int | None = None,
    consensus: StoreConsensus | None = None,
) -> Place:
    """Save a structure under `root`; every rank calls it, and returns when it is committed.

    Args:
        root: A directory on storage that all ranks share, or a URL (s3://bucket/dir).
        state: This rank's structure. Ranks may have different tensors, the same ones, or `Part`s of
            them; for all other values, rank 0's count.
        step: Steps done. Of two checkpoints, the one with more steps is newer.
        tag: A name to load it by; by default global_step<N>.
        keep_last: The number of newest checkpoints that stay, at least 2; None: all.
        consensus: The votes of the ranks; None: of the default process group, or of this process
            alone.

    Returns:
        The directory of the checkpoint.

    Raises:
        CheckpointError: A value of the structure cannot be stored, the ranks contradict each
            other, or a rank failed: nothing was published. On every rank.
        PeerLost: A rank is lost.
    """
    consensus, where = consensus or group_consensus("plain"), place(root)
    own: dict[str, Part] = {}
    try:
        keep = Keep(last=keep_last)
        skeleton = mapped(state, "", lambda value, name: _taken_out(value, name, own))
        vote: Record = {
            "state": pack(skeleton, "state"),
            "tensors": {
                name: [name_of(part.data.dtype), list(part.shape), part.start, part.data.numel()]
                for name, part in own.items()
            },
        }
    except CheckpointError as error:
        # Without its vote the others would wait for the whole timeout.
        vote = {"problem": f"rank {consensus.rank}: {error}"}
    agreed = consensus.ask(vote, agree)
    if "problem" in agreed:
        raise CheckpointError(f"{where} was not saved: {agreed['problem']}")
    whole = State(
        tensors={
            TensorId(PARAM, name): TensorInfo(tuple(shape), DTYPES[dtype])
            for name, (dtype, shape) in agreed["tensors"].items()
        },
        pieces=tuple(
            Piece(TensorId(PARAM, name), own[name].start, own[name].data)
            for name in agreed["writes"][consensus.rank]
        ),
        meta={
            "engine": {**UNKNOWN_RUN, "step": step, "groups": []},
            "client": {},
            STRUCTURE: agreed["state"],
        },
    )
    return publish(where, whole, consensus, step=step, tag=tag, keep=keep)


def publish(
    root: Place,
    state: State,
    consensus: StoreConsensus,
    *,
    step: int,
    tag: str | None,
    keep: Keep,
) -> Place:
    """Save a state that no engine owns, see `commit.save`, and delete what is not to be kept."""
    tag, round = tag or f"global_step{step}", current_round()
    # No fence: a plain save needs no agent, and no etcd to be published.
    path = commit.save(root, state, consensus, step=step, tag=tag, round=round, fence=None)
    if consensus.rank == COORDINATOR:
        tidy(root, path, keep)
    return path


def load(
    root: str | os.PathLike[str],
    into: Mapping[str, Any] | None = None,
    *,
    tag: str | None = None,
    consensus: StoreConsensus | None = None,
) -> Restored | None:
    """Load the newest complete checkpoint; every rank calls it, in a group of any size.

    Args:
        root: As given to `save`.
        into: A structure with tensors and `Part`s that are filled in place, on any device; other
            tensors of the checkpoint are not read. None: every rank gets all tensors, on the CPU.
        tag: Only a checkpoint of this name.
        consensus: See `save`.

    Returns:
        The restored state; None if nothing was ever saved here.

    Raises:
        DamagedCheckpoint: There are checkpoints, and none is whole; names them all.
        ModelMismatch: The newest does not have a tensor of `into`, or has it in another shape or
            dtype; `into` is unchanged.
        CheckpointError: No checkpoint has this name, a rank's `into` has what cannot be filled, or
            a rank could not read: `into` may be half filled. On every rank.
        PeerLost: A rank is lost.
    """
    filled: dict[str, Part] = {}
    originals: dict[str, Tensor | Part] = {}
    refused: CheckpointError | None = None
    try:
        mapped(into, "", lambda value, name: _taken_out(value, name, filled, originals))
    except CheckpointError as error:
        refused = error  # raised where the ranks vote: the others would wait for this one

    def wanted(manifest: Manifest) -> State:
        if refused is not None:
            raise refused
        ids = {t.fqn: t for t in manifest.tensors if t.kind in (PARAM, BUFFER)}
        if into is None:
            filled.clear()  # of a checkpoint that was tried before
            for name, tensor in ids.items():
                info = manifest.tensors[tensor]
                filled[name] = _whole(torch.empty(info.shape, dtype=info.dtype, device="cpu"))
        # A name that is not there is wanted all the same: the error of the load names it.
        parts = {ids.get(name, TensorId(PARAM, name)): part for name, part in filled.items()}
        tensors = {t: TensorInfo(part.shape, part.data.dtype) for t, part in parts.items()}
        pieces = tuple(Piece(t, part.start, part.data) for t, part in parts.items())
        return State(tensors, pieces, spare=frozenset(manifest.tensors.keys() - tensors.keys()))

    loaded = restore.load(place(root), consensus or group_consensus("plain"), wanted, tag=tag)
    if loaded is None:
        if refused is not None:
            raise refused
        return None
    # What the script gave is what it gets back, filled, as its own objects.
    values = originals or {n: part.data.view(part.shape) for n, part in filled.items()}
    # One whose elements are not in memory as they read was read into a copy.
    for name, value in originals.items():
        if isinstance(value, Tensor) and value.data_ptr() != filled[name].data.data_ptr():
            value.detach().copy_(filled[name].data.view(value.shape))
    manifest = loaded.manifest
    skeleton = manifest.meta.get(STRUCTURE, {name: pack(Stored(name)) for name in filled})
    state = mapped(unpack(skeleton), "", lambda v, _: values.get(v) if type(v) is Stored else v)
    return Restored(state=state, step=manifest.step, tag=manifest.tag, path=loaded.path)


def agree(votes: Sequence[Record]) -> Record:
    """Which tensors all ranks save together, and which rank writes which; a pure function.

    A vote has "state", the packed structure, and "tensors", name -> dtype, shape, start and count
    of the elements; or "problem". The verdict has "state", "tensors" (name -> dtype and shape) and
    "writes" (by rank, names); or "problem".
    """
    state: Any = None
    tensors: dict[str, list[Any]] = {}
    holders: dict[tuple[str, int, int], list[int]] = {}
    for rank, vote in enumerate(votes):
        if "problem" in vote:
            return vote
        state = _joined(state, unpack(vote["state"])) if rank else unpack(vote["state"])
        for name, (dtype, shape, start, count) in vote["tensors"].items():
            known = tensors.setdefault(name, [dtype, shape])
            if known != [dtype, shape]:
                here, there = f"{dtype} {shape}", f"{known[0]} {known[1]}"
                return {"problem": f"{name} is {here} on rank {rank} and {there} on one before it"}
            # Elements that several ranks hold are written once; `commit` checks that all are there.
            holders.setdefault((name, start, count), []).append(rank)
    bytes_of, writes = [0] * len(votes), [list[str]() for _ in votes]
    for (name, _, count), ranks in holders.items():
        # Of the ranks that hold the same elements, the one with the fewest bytes so far.
        writer = min(ranks, key=bytes_of.__getitem__)
        writes[writer].append(name)
        bytes_of[writer] += count * DTYPES[tensors[name][0]].itemsize
    return {"state": pack(state, "state"), "tensors": tensors, "writes": writes}


def _joined(first: Any, second: Any) -> Any:
    """A structure with the keys that only another one has; for common keys, the first counts."""
    if not (isinstance(first, Mapping) and isinstance(second, Mapping)):
        return first
    both = {key: _joined(value, second.get(key)) for key, value in first.items()}
    return {**both, **{key: value for key, value in second.items() if key not in both}}


def mapped(value: Any, name: str, change: Callable[[Any, str], Any]) -> Any:
    """The same structure; `change` replaces each value that is no collection, given its name."""
    prefix = name and f"{name}."
    match value:
        # Others, such as a Counter, have more than their items: `client_state` knows some.
        case Mapping() if not hasattr(value, "__missing__"):
            return {key: mapped(inner, f"{prefix}{key}", change) for key, inner in value.items()}
        case list() | tuple() if type(value) in (list, tuple):
            inner_values = enumerate(value)
            return type(value)(mapped(each, f"{prefix}{at}", change) for at, each in inner_values)
        case _:
            return change(value, name)


def _taken_out(
    value: Any, name: str, parts: dict[str, Part], originals: dict[str, Tensor | Part] | None = None
) -> Any:
    """The placeholder of a tensor in the structure; the tensor goes to `parts` and `originals`."""
    if not isinstance(value, Tensor | Part):
        return value
    if name in parts:
        raise CheckpointError(f"two tensors are called {name}; rename one of the keys on the way")
    if hasattr(value, "to_local"):
        raise CheckpointError(
            f"{name} is a {type(value).__name__}; pass the elements that this rank has, as a "
            "zero_checkpoint.Part"
        )
    if isinstance(value, Tensor):
        check_dense(value, name)
    parts[name] = value if isinstance(value, Part) else _whole(value)
    if originals is not None:
        originals[name] = value
    return Stored(name)


def _whole(tensor: Tensor) -> Part:
    """All of a tensor; a copy, if its elements are not in memory as they read."""
    return Part(elements(tensor).view(-1), 0, tuple(tensor.shape))


def group_consensus(part: str, group: dist.ProcessGroup | None = None) -> StoreConsensus:
    """The votes of a process group, of which `part` is one use; or of this process.

    None: the default group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return StoreConsensus.alone()
    if group is not None:  # its ranks count their calls apart from those of other groups
        part = f"{part}/{','.join(map(str, dist.get_process_group_ranks(group)))}"
    store = group_store(part)
    return StoreConsensus(
        store, dist.get_rank(group), dist.get_world_size(group), key=store.votes_key
    )
