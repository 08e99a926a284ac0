"""torch.distributed.checkpoint directories, with optimizer state, without running their pickles.

What the user saved under which key is their choice: `dcp.layout` finds it, or the user names it.
The optimizer is expected as `torch.distributed.checkpoint.state_dict` makes it, with or without
`flatten_optimizer_state_dict`.
"""

from __future__ import annotations

import dataclasses
import io
import math
import pathlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.planner import WriteItem

from zero_checkpoint.dcp.layout import Layout, find_layout
from zero_checkpoint.dcp.names import Stored, keys_of
from zero_checkpoint.dcp.optimizer import Optimizer
from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.format.dtypes import NAMES
from zero_checkpoint.loading.candidates import Candidate
from zero_checkpoint.state.torch_state import is_buffer, plain
from zero_checkpoint.tools.conversion.export import (
    errors_of_libraries,
    must_be_new,
    publish,
    workplace,
)
from zero_checkpoint.tools.conversion.foreign import Foreign
from zero_checkpoint.tools.conversion.pickles import load_listed, load_torch
from zero_checkpoint.tools.tensors import read_tensor
from zero_checkpoint.tools.verify import Progress

_RECORDS = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "MetadataIndex",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(metadata.__name__, name): getattr(metadata, name) for name in _RECORDS},
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in NAMES},
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): lambda name: name,
    # A path of a stranger's that can open nothing; the second name is that of Python 3.13.
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
}


def read_dcp(
    source: Path,
    *,
    allow_pickle: bool,
    model_key: str | None,
    optimizer_key: str | None,
    buffers: tuple[str, ...],
) -> Foreign:
    """A DCP directory: parameters, buffers and, if it is there, optimizer state.

    Keys of the state_dicts are None: to be found; model "": the whole table. `buffers` are patterns
    of further names that are buffers.

    Raises:
        CheckpointError: The directory is no DCP checkpoint, is damaged, or has no model under that
            key.
    """
    store = _Store.open(source, allow_pickle)
    layout = store.layout(model_key, optimizer_key)
    whole = {key.removeprefix(layout.model): store.tensor(key) for key in layout.tensors}
    aside = {name for name, data in whole.items() if is_buffer(name, data.dtype, buffers)}
    params = {name: data for name, data in whole.items() if name not in aside}
    found = Optimizer.read(store.keys, store.value, layout.optimizer)
    strange = sorted(found.state.keys() - params.keys())
    if strange:
        raise CheckpointError(
            f"{source}: the optimizer has state for {strange[0]!r}, which is not a parameter of "
            "the model; name the keys of both with --model-key and --optimizer-key"
        )
    # The step, if all keys that count steps agree.
    counts = {plain(store.value(key), None) for key in layout.steps}
    count = counts.pop() if len(counts) == 1 else None
    step = count if isinstance(count, int) else None
    return Foreign(
        params=params,
        buffers={name: whole[name] for name in sorted(aside)},
        moments=found.moments(),
        groups=found.groups(params),
        run={} if step is None else {"step": step},
        left_out=(*layout.left_out, *(layout.steps if step is None else ())),
    )


@dataclass(frozen=True)
class _Store:
    """A DCP directory whose metadata are read."""

    directory: Path
    records: Any
    keys: tuple[str, ...]
    allow_pickle: bool

    @staticmethod
    def open(source: Path, allow_pickle: bool) -> _Store:
        """Read the metadata of a directory."""
        path = source / ".metadata"
        try:
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(
                f"{source}: no .metadata in it: no DCP checkpoint, or a save that died"
            ) from None
        # The metadata are a pickle, in which nothing but DCP's own records may occur.
        records = load_listed(data, str(path), _ALLOWED)
        if not isinstance(records, metadata.Metadata):
            raise CheckpointError(f"{path}: holds a {type(records).__name__}, not DCP's metadata")
        return _Store(source, records, tuple(records.state_dict_metadata), allow_pickle)

    def layout(self, model_key: str | None, optimizer_key: str | None) -> Layout:
        """The keys of the model, of its optimizer and of the step; see `find_layout`."""
        records = self.records.state_dict_metadata
        dtypes = {
            key: record.properties.dtype
            for key, record in records.items()
            if isinstance(record, metadata.TensorStorageMetadata)
        }
        weights = {k for k, dtype in dtypes.items() if dtype.is_floating_point or dtype.is_complex}
        try:
            return find_layout(
                self.keys, dtypes, weights, model_key=model_key, optimizer_key=optimizer_key
            )
        except CheckpointError as error:
            raise CheckpointError(f"{self.directory}: {error}") from None

    def tensor(self, key: str) -> Tensor:
        """One tensor, put together from its chunks."""
        record = self.records.state_dict_metadata[key]
        if not isinstance(record, metadata.TensorStorageMetadata):
            raise CheckpointError(f"{self.directory}: {key} is not a tensor; choose --model-key")
        whole = torch.empty(record.size, dtype=record.properties.dtype)
        covered = 0
        for chunk in record.chunks:
            data = self._read(metadata.MetadataIndex(key, chunk.offsets))
            if not isinstance(data, Tensor) or data.shape != chunk.sizes:
                raise CheckpointError(f"{self.directory}: {key}: a chunk is not as described")
            box = zip(chunk.offsets, chunk.sizes, strict=True)
            whole[tuple(slice(low, low + size) for low, size in box)] = data
            covered += data.numel()
        if covered != math.prod(record.size):
            raise CheckpointError(f"{self.directory}: {key}: its chunks do not cover it")
        return whole

    def value(self, key: str) -> Any:
        """The tensor or plain value under a key; None if the key is missing."""
        record = self.records.state_dict_metadata.get(key)
        if record is None:
            return None
        if isinstance(record, metadata.TensorStorageMetadata):
            return self.tensor(key)
        return self._read(metadata.MetadataIndex(key))

    def _read(self, index: Any) -> Any:
        info = self.records.storage_data.get(index)
        if info is None:
            raise CheckpointError(
                f"{self.directory}: {index.fqn}: the metadata do not name the file that holds it"
            )
        if getattr(info, "transform_descriptors", None):  # torch before 2.7 has none
            raise CheckpointError(
                f"{self.directory}: {index.fqn} is compressed; save it without compression"
            )
        name = str(info.relative_path)
        # The metadata are a stranger's: they may name any file of this machine.
        if Path(name).name != name:
            raise CheckpointError(f"{self.directory}: {index.fqn} lies outside, at {name}")
        try:
            with (self.directory / name).open("rb") as file:
                file.seek(info.offset)
                data = file.read(info.length)
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.directory / name}: missing; it holds {index.fqn}"
            ) from None
        what = f"{self.directory / name}: {index.fqn}"
        return load_torch(io.BytesIO(data), what, allow_pickle=self.allow_pickle)


# ---- export ----


MODEL, OPTIMIZER = "model", "optimizer"
"""The keys of both in a state that DCP has not saved."""


class _Streamed(dcp.DefaultSavePlanner):
    """Reads a tensor when its turn to be written has come."""

    def __init__(self, checkpoint: Candidate, stored: Stored, progress: Progress) -> None:
        super().__init__(flatten_state_dict=False)
        self._checkpoint = checkpoint
        self._stored = stored
        self._progress = progress

    def create_global_plan(
        self, all_plans: list[dcp.SavePlan]
    ) -> tuple[list[dcp.SavePlan], dcp.Metadata]:
        """DCP's plan, with the places of the keys in the nested state that they are of."""
        plans, metadata = super().create_global_plan(all_plans)
        return plans, dataclasses.replace(metadata, planner_data=dict(self._stored.paths))

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """The tensor in the place of one without memory."""
        if not (isinstance(object, Tensor) and object.is_meta):
            return super().transform_object(write_item, object)
        data = read_tensor(self._checkpoint, self._stored.tensors[write_item.index.fqn])
        self._progress(data.numel() * data.element_size())
        return data


def export_dcp(
    checkpoint: Candidate, out: Path, progress: Progress = lambda _: None
) -> tuple[int, list[Path]]:
    """Write a directory for `dcp.load`, with the optimizer; returns tensors, and its files.

    The keys are `model.` and `optimizer.` with what `torch.distributed.checkpoint.state_dict`
    has below them, in both forms of an optimizer's state_dict; or those that DCP has saved.

    Raises:
        CheckpointError: `out` exists, or another export writes it.
        DamagedCheckpoint: A tensor is not what was saved; nothing is left behind.
        OSError: Reading or writing failed.
    """
    must_be_new(out)
    table = checkpoint.manifest.tensors
    stored = keys_of(checkpoint.manifest, MODEL, OPTIMIZER)
    blank = {
        key: torch.empty(table[tensor].shape, dtype=table[tensor].dtype, device="meta")
        for key, tensor in stored.tensors.items()
    }
    with workplace(out) as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        partial = directory / out.name
        with errors_of_libraries(out):
            dcp.save(
                {**blank, **stored.values},
                storage_writer=dcp.FileSystemWriter(partial, sync_files=True),
                planner=_Streamed(checkpoint, stored, progress),
                no_dist=True,
            )
        publish(partial, out)
    return len(blank), sorted(out.iterdir())
