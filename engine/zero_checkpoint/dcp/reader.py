"""The storage reader for `torch.distributed.checkpoint.load`: universal checkpoints by its keys.

All ranks read the same checkpoint. A rank reads the elements that it wants, whatever the ranks were
that have saved them.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, StorageReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.futures import Future

from zero_checkpoint.consensus import StoreConsensus
from zero_checkpoint.dcp.names import Stored, keys_of
from zero_checkpoint.errors import CheckpointError, ModelMismatch
from zero_checkpoint.files.place import Place, place
from zero_checkpoint.format.dtypes import elements
from zero_checkpoint.format.manifest import Manifest
from zero_checkpoint.format.pieces import Piece, State, TensorInfo, cut
from zero_checkpoint.loading import restore
from zero_checkpoint.plain import group_consensus


class Reader(StorageReader):
    """Reads universal checkpoints.

    dcp.load(state, storage_reader=Reader("checkpoints"))
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        tag: str | None = None,
        model: str = "model",
        optimizer: str = "optimizer",
        process_group: dist.ProcessGroup | None = None,
        consensus: StoreConsensus | None = None,
    ) -> None:
        """Read below a root.

        Args:
            root: As given to `Writer`, `zero_torch`, `zero_engine` or `zero_checkpoint.save`;
                None: the parent of the `checkpoint_id` that `dcp.load` is given.
            tag: Only a checkpoint of this name; None: the newest complete one.
            model: The key of the model's state_dict in the state, for a checkpoint of
                `zero_engine` or `zero_torch`; "": the state is the model's.
            optimizer: The same of the optimizer's state_dict.
            process_group: As given to `dcp.load`; None: the default one.
            consensus: The votes of the ranks that load; None: of the process group. For
                `dcp.load(no_dist=True)` of one rank of several, `StoreConsensus.alone()`.
        """
        self.path: Place | None = None
        """The directory of the checkpoint that was loaded last."""
        self._root = place(root) if root is not None else None
        self._has_own_root = root is not None
        self._tag = tag
        self._keys = (model, optimizer)
        self._group = process_group
        self._given = consensus
        self._consensus: StoreConsensus | None = None

    # ---- the interface of DCP ----

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take a directory as `<root>/<tag>`."""
        if checkpoint_id is not None:
            named = place(checkpoint_id)
            if not self._has_own_root:  # one of a call before does not count
                self._root = named.parent
            self._tag = named.name

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The keys of the newest checkpoint, or of that with the tag. Collective.

        Raises:
            DamagedCheckpoint: There are checkpoints, and none is whole.
            CheckpointError: There is none.
        """
        del args, kwargs
        if self._root is None:
            raise CheckpointError("there is no directory; give Reader(root) or checkpoint_id")
        self._consensus = self._given or group_consensus("dcp", self._group)
        # DCP plans by the keys, and then asks for the tensors: nothing is filled yet.
        manifest = self._restore(_nothing).manifest
        stored = keys_of(manifest, *self._keys)
        records: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            key: _record(manifest.tensors[tensor]) for key, tensor in stored.tensors.items()
        }
        for key, value in stored.values.items():
            if isinstance(value, Tensor):
                records[key] = _record(TensorInfo(tuple(value.shape), value.dtype))
            else:
                records[key] = BytesStorageMetadata()
        return Metadata(records, planner_data=dict(stored.paths))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: `read_data` looks for the checkpoint once more, and may fall back."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what this rank wants. Collective.

        Raises:
            DamagedCheckpoint: No checkpoint is whole.
            ModelMismatch: The checkpoint has other tensors.
            CheckpointError: A rank could not read; the state may be half filled.
            PeerLost: A rank is lost.
        """
        filling = _Filling(plan, planner, self._keys)
        # If a block is damaged, all ranks fall back to the checkpoint before; then `wanted` is
        # asked again.
        self.path = self._restore(filling.wanted).path
        filling.finish()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path and any URL."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def _restore(self, wanted: Callable[[Manifest], State]) -> restore.Loaded:
        assert self._root is not None
        assert self._consensus is not None
        loaded = restore.load(self._root, self._consensus, wanted, tag=self._tag)
        if loaded is None:
            raise CheckpointError(f"{self._root}: there is no checkpoint yet")
        return loaded


def _nothing(manifest: Manifest) -> State:
    return State({}, (), spare=frozenset(manifest.tensors))


def _record(info: TensorInfo) -> TensorStorageMetadata:
    """A tensor that is one chunk: a rank may ask for any box of it."""
    shape = torch.Size(info.shape)
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=shape)
    return TensorStorageMetadata(TensorProperties(dtype=info.dtype), shape, [chunk])


class _Filling:
    """The pieces that DCP wants on this rank, from the checkpoint that is tried."""

    def __init__(self, plan: LoadPlan, planner: LoadPlanner, keys: tuple[str, str]) -> None:
        self._plan = plan
        self._planner = planner
        self._keys = keys
        self._stored = Stored(tensors={}, values={}, paths={})
        self._read: list[tuple[ReadItem, Tensor, Tensor]] = []
        """Each wanted box, and the memory that it is read into: itself, if its bytes are as
        they are stored."""

    def wanted(self, manifest: Manifest) -> State:
        """The pieces to fill from a checkpoint."""
        stored = self._stored = keys_of(manifest, *self._keys)
        self._read = []
        pieces: list[Piece] = []
        for item in self._plan.items:
            key = item.storage_index.fqn
            if key not in stored.tensors and key not in stored.values:
                raise ModelMismatch(f"{manifest.directory} (tag {manifest.tag!r}) has no {key}")
            # What is no tensor is in the manifest, and there already; `finish` gives it to DCP.
            if item.type is LoadItemType.BYTE_IO or key in stored.values:
                continue
            tensor = stored.tensors[key]
            info = manifest.tensors[tensor]
            target = self._planner.resolve_tensor(item).detach()
            is_plain = elements(target).data_ptr() == target.data_ptr()
            as_stored = is_plain and target.dtype == info.dtype
            memory = (
                target
                if as_stored
                else torch.empty(tuple(item.lengths), dtype=info.dtype, device="cpu")
            )
            self._read.append((item, target, memory))
            pieces += cut(tensor, info.shape, item.storage_offsets, memory)
        wanted = {piece.id: manifest.tensors[piece.id] for piece in pieces}
        spare = frozenset(manifest.tensors.keys() - wanted.keys())
        return State(wanted, tuple(pieces), spare=spare)

    def finish(self) -> None:
        """Give DCP what was read, and the values that are no tensors."""
        # Not before: as long as the ranks may fall back, it may be replaced.
        for item, target, memory in self._read:
            if memory is not target:
                target.copy_(memory)
            self._planner.commit_tensor(item, target)
        for item in self._plan.items:
            key = item.storage_index.fqn
            if key not in self._stored.values:
                continue
            value = self._stored.values[key]
            if item.type is LoadItemType.BYTE_IO:
                data = io.BytesIO()  # as DCP's own writer stores a value: planners unpickle it
                torch.save(value, data)
                data.seek(0)
                self._planner.load_bytes(item, data)
            else:
                target = self._planner.resolve_tensor(item).detach()
                box = zip(item.storage_offsets, item.lengths, strict=True)
                target.copy_(value[tuple(slice(low, low + size) for low, size in box)])
                self._planner.commit_tensor(item, target)
