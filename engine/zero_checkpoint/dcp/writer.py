"""The storage writer for `torch.distributed.checkpoint.save`: its state as a universal checkpoint.

DCP decides who writes what; `commit` writes and publishes it, so a checkpoint is there whole, or
not at all.
"""

from __future__ import annotations

import io
import logging
import os
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import Metadata, SavePlan, SavePlanner, StorageWriter
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from zero_checkpoint.consensus import Record, StoreConsensus
from zero_checkpoint.dcp.names import META, Saved, name_all
from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.object_disk import disk_of
from zero_checkpoint.files.place import Place, place
from zero_checkpoint.format.dtypes import DTYPES, elements, name_of
from zero_checkpoint.format.pieces import State, TensorInfo, cut
from zero_checkpoint.format.table import TensorTable
from zero_checkpoint.plain import UNKNOWN_RUN, group_consensus, publish
from zero_checkpoint.saving.housekeeping import Keep
from zero_checkpoint.state.client_state import pack, unpack

_log = logging.getLogger(__name__)

METADATA = ".metadata"
"""The name under which DCP keeps a pickle that describes its checkpoint."""
_FOR_READERS = b"A universal checkpoint: read it with zero_checkpoint.dcp.Reader.\n"
_NUMBER = re.compile(r".*?(\d+)")
_Box = tuple[str, TensorInfo, Sequence[int], Tensor]
"""A key, the whole tensor, where the box begins, and the box."""


class Writer(StorageWriter):
    """Writes universal checkpoints.

    dcp.save(state, storage_writer=Writer("checkpoints", step=100))
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        step: int | None = None,
        tag: str | None = None,
        keep_last: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        consensus: StoreConsensus | None = None,
    ) -> None:
        """Write below a root.

        Args:
            root: A directory on storage that all ranks share, or a URL; None: the parent of the
                `checkpoint_id` that `dcp.save` is given, whose name is then the tag.
            step: Steps done; None: what the state has under a key such as "step", or the number at
                the end of the tag.
            tag: A name to load it by; by default global_step<N>.
            keep_last: The number of newest checkpoints that stay, at least 2; None: all.
            process_group: As given to `dcp.save`; None: the default one.
            consensus: The votes of the ranks that save; None: of the process group. For
                `dcp.save(no_dist=True)` of one rank of several, `StoreConsensus.alone()`.
        """
        self.path: Place | None = None
        """The directory of the checkpoint that was saved last."""
        self._root = place(root) if root is not None else None
        self._has_own_root = root is not None
        self._step = step
        self._tag = tag
        self._keep = Keep(last=keep_last)
        self._group = process_group
        self._consensus = consensus

    # ---- the interface of DCP ----

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take a directory as `<root>/<tag>`."""
        if checkpoint_id is not None:
            named = place(checkpoint_id)
            if not self._has_own_root:  # one of a call before does not count
                self._root = named.parent
            self._tag = named.name

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse a save in which the ranks do not write together."""
        del is_coordinator, args
        if self._root is None:
            raise CheckpointError("there is no directory; give Writer(root) or checkpoint_id")
        if not kwargs.get("use_collectives", True):
            raise CheckpointError(
                "use_collectives=False makes a checkpoint of each rank, and a universal checkpoint "
                "is of all ranks; leave it out"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Leave the plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part, and commit the checkpoint of all ranks.

        Raises:
            CheckpointError: The state cannot be stored, or a rank failed: nothing was published.
                On every rank.
            PeerLost: A rank is lost.
        """
        consensus = self._consensus or group_consensus("dcp", self._group)
        boxes, vote = _own(plan, planner, consensus.rank)
        agreed = consensus.ask(vote, agree)
        root = self._root
        assert root is not None
        if "problem" in agreed:
            raise CheckpointError(f"{root} was not saved: {agreed['problem']}")
        infos = {
            key: TensorInfo(tuple(shape), DTYPES[dtype])
            for key, (dtype, shape) in agreed["tensors"].items()
        }
        saved = name_all(infos, unpack(agreed["values"]), agreed["paths"])
        step = self._step_of(saved)
        state = State(
            tensors=TensorTable((tensor, infos[key]) for key, tensor in saved.ids.items()),
            pieces=tuple(
                piece
                for key, info, offsets, box in boxes
                if key in saved.ids
                for piece in cut(saved.ids[key], info.shape, offsets, box)
            ),
            meta={
                "engine": {**UNKNOWN_RUN, "step": step, "groups": saved.groups},
                "client": {},
                META: saved.meta,
            },
        )
        self.path = publish(root, state, consensus, step=step, tag=self._tag, keep=self._keep)
        done: Future[list[WriteResult]] = Future()
        # A value that is no tensor has no size that DCP knows.
        sizes = ((item.index, item.tensor_storage_size() or 0) for item in plan.items)
        done.set_result([WriteResult(index, size, None) for index, size in sizes])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: leave the file by which programs recognize a checkpoint of DCP."""
        del metadata, results
        assert self.path is not None
        # For programs, such as torchtitan, that look for the newest one before they make a reader;
        # the checkpoint is committed without it.
        disk = disk_of(self.path)
        try:
            disk.write_whole(self.path / METADATA, _FOR_READERS)
            disk.sync_directory(self.path)
        except OSError as error:
            _log.warning("%s is saved, but %s could not be written: %s", self.path, METADATA, error)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path and any URL."""
        return isinstance(checkpoint_id, str | os.PathLike)

    # ---- the checkpoint ----

    def _step_of(self, saved: Saved) -> int:
        if self._step is not None:
            return self._step
        if saved.step is not None:
            return saved.step
        number = _NUMBER.fullmatch(self._tag or "")
        if number is None:
            raise CheckpointError(
                "how many steps were done is not known, by which checkpoints are ordered: give "
                'Writer(step=...), a "step" in the state, or a checkpoint_id that ends with it'
            )
        return int(number[1])


def _own(plan: SavePlan, planner: SavePlanner, rank: int) -> tuple[list[_Box], Record]:
    """The boxes that DCP lets this rank write, and its vote, which may be an error."""
    boxes: list[_Box] = []
    values: dict[str, Any] = {}
    try:
        for item in plan.items:
            key, data = item.index.fqn, planner.resolve_data(item)
            if item.type is WriteItemType.BYTE_IO or item.tensor_data is None:
                assert isinstance(data, io.BytesIO)
                data.seek(0)
                # This process has pickled it a moment ago: it is as safe as the object was.
                values[key] = pack(torch.load(data, weights_only=False), key)
                continue
            assert isinstance(data, Tensor)
            whole = TensorInfo(tuple(item.tensor_data.size), data.dtype)
            boxes.append((key, whole, item.tensor_data.chunk.offsets, elements(data)))
            # It may be a tensor or a number, such as a count of steps: `name_all` decides.
            if not whole.shape:
                values[key] = pack(data, key)
        tensors = {key: [name_of(i.dtype), list(i.shape)] for key, i, _, _ in boxes}
    except Exception as error:
        # It votes all the same: every rank then raises the same error, and DCP passes that on.
        return [], {"problem": f"rank {rank}: {type(error).__name__}: {error}"}
    # Where the keys are in the state, if the planner has flattened that.
    known = plan.planner_data if isinstance(plan.planner_data, dict) else {}
    paths = {key: list(known[key]) for item in plan.items if (key := item.index.fqn) in known}
    # What is no text or number would not come back as the same from JSON.
    paths = {k: p for k, p in paths.items() if all(isinstance(part, str | int) for part in p)}
    return boxes, {"tensors": tensors, "values": values, "paths": paths}


def agree(votes: Sequence[Record]) -> Record:
    """The "tensors", "values" and "paths" of all ranks, or a "problem"; a pure function.

    A vote has "tensors", key -> dtype and shape, "values", key -> packed value, and "paths", key ->
    its place in the state; or "problem".
    """
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for rank, vote in enumerate(votes):
        if "problem" in vote:
            return vote
        for key, known in vote["tensors"].items():
            if tensors.setdefault(key, known) != known:
                here, there = (f"{dtype} {shape}" for dtype, shape in (known, tensors[key]))
                return {"problem": f"{key} is {here} on rank {rank} and {there} on one before it"}
        # Of a value that several ranks have, the first one counts.
        values = {**vote["values"], **values}
        paths = {**vote["paths"], **paths}
    return {"tensors": tensors, "values": values, "paths": paths}
