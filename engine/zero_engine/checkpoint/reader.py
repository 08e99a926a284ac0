"""Fills pieces from the files of a checkpoint, believing no byte that it has not verified.

Must always hold: `fill` returns only if every block that it touched has the digest that the
manifest names. Host tensors are read into before that is known, so after a failure the pieces
hold anything; the caller then fills all of them from another checkpoint. The safetensors
headers are not needed and not read, except as bytes of the blocks that they share with data.

Called by `restore` on every rank.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from zero_engine.checkpoint.dtypes import byte_view, host_bytes
from zero_engine.checkpoint.layout import check_piece, describe
from zero_engine.checkpoint.manifest import FileRecord, Manifest
from zero_engine.checkpoint.match import resolve
from zero_engine.checkpoint.pieces import Piece, State
from zero_engine.checkpoint.plan import BlockRead, Part, Want, plan
from zero_engine.errors import DamagedCheckpoint

_IOV_MAX = 1024
"""Buffers that one preadv takes (Linux UIO_MAXIOV)."""
_SHOWN = 4
_DAMAGE = frozenset({errno.ENOENT, errno.EIO})
"""What reading a damaged checkpoint fails with; any other error is this node's own problem."""


def fill(directory: Path, manifest: Manifest, state: State) -> int:
    """Read `state.pieces` in place; returns how many bytes were read from files.

    Raises:
        ModelMismatch: See `match.resolve`; nothing was read.
        CheckpointError: A wanted piece is not storable, see `layout.check_piece`.
        DamagedCheckpoint: Names file, block, tensors and ranges of elements.
        OSError: This rank could not read, for a reason other than damage.
    """
    sources = resolve(state, manifest)
    for piece in state.pieces:
        check_piece(piece, state.tensors)
    index = {tensor: position for position, tensor in enumerate(manifest.tensors)}
    wants = [
        Want(index[sources[p.id]], p.start, p.data.numel(), p.data.element_size())
        for p in state.pieces
    ]
    reads = plan(wants, manifest.fragments, len(index), manifest.block_bytes)
    reader = _Reader(directory, manifest, state.pieces)
    return sum(
        reader.read_file(manifest.files[file], list(group))
        for file, group in groupby(reads, key=lambda read: read.file)
    )


@dataclass(frozen=True, slots=True)
class _Target:
    """The bytes of one piece; `host` is None when they are on a device."""

    data: Tensor
    host: memoryview | None


def _target(piece: Piece) -> _Target:
    data = byte_view(piece.data)
    return _Target(data, host_bytes(data) if data.device.type == "cpu" else None)


class _Reader:
    def __init__(self, directory: Path, manifest: Manifest, pieces: Sequence[Piece]) -> None:
        self._directory = directory
        self._manifest = manifest
        self._targets = [_target(piece) for piece in pieces]
        longest = max((file.size_bytes for file in manifest.files), default=0)
        self._scratch = torch.empty(min(longest, manifest.block_bytes), dtype=torch.uint8)

    def read_file(self, file: FileRecord, reads: list[BlockRead]) -> int:
        """Carry out the reads of one file; returns the bytes read."""
        read = reads[0]
        path = self._directory / file.name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for read in reads:
                    self._read_block(descriptor, file, read)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno not in _DAMAGE:
                raise
            raise self._damage(file, read, str(error.strerror)) from error
        return sum(self._length(file, read) for read in reads)

    def _length(self, file: FileRecord, read: BlockRead) -> int:
        block_bytes = self._manifest.block_bytes
        return min(block_bytes, file.size_bytes - read.block * block_bytes)

    def _read_block(self, descriptor: int, file: FileRecord, read: BlockRead) -> None:
        begin, length = read.block * self._manifest.block_bytes, self._length(file, read)
        buffers = self._buffers(read.parts, begin, length)
        missing = read_exactly(descriptor, buffers, begin)
        if missing:
            raise self._damage(file, read, f"ends {missing} bytes too early")
        if _digest(buffers) != file.digests[read.block]:
            raise self._damage(file, read, "is not what was saved (XXH3-64 differs)")
        for part in read.parts:
            self._copy_to_device(part, part.offset - begin)

    def _buffers(self, parts: Sequence[Part], begin: int, length: int) -> list[memoryview]:
        """Where the bytes of a block go, in order: to the targets, or between them to scratch."""
        scratch = host_bytes(self._scratch)
        buffers, at = [], 0
        for part in parts:
            offset = part.offset - begin
            host = self._targets[part.want].host
            here = scratch[offset : offset + part.length]
            buffers += [
                scratch[at:offset],
                here if host is None else host[part.at : part.at + part.length],
            ]
            at = offset + part.length
        return [buffer for buffer in [*buffers, scratch[at:length]] if buffer]

    def _copy_to_device(self, part: Part, offset: int) -> None:
        target = self._targets[part.want]
        if target.host is None:
            verified = self._scratch[offset : offset + part.length]
            target.data[part.at : part.at + part.length].copy_(verified)

    def _damage(self, file: FileRecord, read: BlockRead, problem: str) -> DamagedCheckpoint:
        begin = read.block * self._manifest.block_bytes
        end = begin + self._length(file, read)
        ranges = contents(self._manifest, read.file, begin, end)
        more = f" and {len(ranges) - _SHOWN} more" if len(ranges) > _SHOWN else ""
        return DamagedCheckpoint(
            f"{self._directory / file.name}: block {read.block} (bytes {begin}:{end}) {problem}; "
            f"it holds {', '.join(ranges[:_SHOWN])}{more}"
        )


def contents(manifest: Manifest, file: int, begin: int, end: int) -> list[str]:
    """Which elements of which tensors lie in bytes [begin, end) of a file, for messages."""
    rows, tensors = manifest.fragments, list(manifest.tensors.items())
    widths = np.array([info.dtype.itemsize for _, info in tensors], dtype=np.int64)[rows.tensor]
    # Elements before the byte, then elements that start before the end; cut to the fragment.
    low = np.maximum((begin - rows.offset) // widths, 0)
    high = np.minimum(-((rows.offset - end) // widths), rows.length)
    first, length = rows.start + low, high - low
    return [
        describe(tensors[rows.tensor[row]][0], int(first[row]), int(length[row]))
        for row in np.flatnonzero((rows.file == file) & (length > 0)).tolist()
    ]


def read_exactly(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Scatter the file's bytes from `offset` into the buffers; returns how many it lacks."""
    left = [buffer for buffer in buffers if buffer]
    missing = sum(map(len, left))
    while left:
        count = os.preadv(descriptor, left[:_IOV_MAX], offset)
        if count == 0:
            break
        offset, missing = offset + count, missing - count
        left = _drop(left, count)
    return missing


def _drop(buffers: list[memoryview], count: int) -> list[memoryview]:
    """The buffers without their first `count` bytes."""
    for position, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[position + 1 :]]
        count -= len(buffer)
    return []


def _digest(buffers: Sequence[memoryview]) -> int:
    digest = xxhash.xxh3_64()
    for buffer in buffers:
        digest.update(buffer)
    return digest.intdigest()
