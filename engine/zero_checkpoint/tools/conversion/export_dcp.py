"""A checkpoint for others as a plain directory of torch.distributed.checkpoint.

One tensor is in memory at a time. Must always hold: as of `export`.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from zero_checkpoint.dcp.names import Stored, keys_of
from zero_checkpoint.loading.candidates import Candidate
from zero_checkpoint.tools.conversion.export import (
    errors_of_libraries,
    must_be_new,
    publish,
    workplace,
)
from zero_checkpoint.tools.tensors import read_tensor
from zero_checkpoint.tools.verify import Progress

MODEL, OPTIMIZER = "model", "optimizer"
"""The keys of both in a state that DCP has not saved."""


class _Streamed(dcp.DefaultSavePlanner):
    """Reads a tensor when its turn to be written has come."""

    def __init__(self, checkpoint: Candidate, stored: Stored, progress: Progress) -> None:
        super().__init__(flatten_state_dict=False)
        self._checkpoint = checkpoint
        self._stored = stored
        self._progress = progress

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
