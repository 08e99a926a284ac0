"""Whole tensors out of a checkpoint, every byte of them verified."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.format.pieces import Piece, State, TensorId
from zero_checkpoint.format.table import grouped, numel
from zero_checkpoint.loading.candidates import Candidate
from zero_checkpoint.loading.reader import fill

BATCH_BYTES = 256 << 20
"""The most that is in memory at once, unless one tensor is larger."""
WIDENED = 1 << 22
"""Elements that are widened to float64 at once, to be compared or summed."""


def read_tensor(checkpoint: Candidate, tensor: TensorId) -> Tensor:
    """One tensor on the CPU, in its own shape and dtype.

    Raises:
        CheckpointError: There is no such tensor.
        DamagedCheckpoint: A block of the tensor is not what was saved.
        OSError: A file could not be read.
    """
    return next(data for _, data in read_tensors(checkpoint, [tensor]))


def read_tensors(
    checkpoint: Candidate, tensors: Iterable[TensorId], *, batch_bytes: int = BATCH_BYTES
) -> Iterator[tuple[TensorId, Tensor]]:
    """Many tensors, each named once, in the order asked for; errors are those of `read_tensor`."""
    table = checkpoint.manifest.tensors

    def size_bytes(tensor: TensorId) -> int:
        if tensor not in table:
            raise CheckpointError(f"there is no tensor {tensor} in it")
        return numel(table[tensor]) * table[tensor].dtype.itemsize

    # In batches: neighbours in a file share blocks, the unit of verification, so reading one small
    # tensor at a time would read most blocks many times.
    for batch in grouped(tensors, size_bytes, batch_bytes):
        whole = {t: torch.empty(numel(table[t]), dtype=table[t].dtype) for t in batch}
        pieces = tuple(Piece(t, 0, data) for t, data in whole.items())
        fill(checkpoint.path, checkpoint.manifest, State(table, pieces))
        for tensor, data in whole.items():
            yield tensor, data.reshape(table[tensor].shape)
