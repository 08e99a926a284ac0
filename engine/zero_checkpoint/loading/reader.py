"""Fills pieces from the files of a checkpoint, and verifies the checksum of every block.

Host tensors are read into before a block is verified, so after a failure the pieces hold anything;
the caller then fills all of them from another checkpoint. The safetensors headers are not needed
and not read, except as bytes of the blocks that they share with data.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, closing
from itertools import compress, groupby
from operator import not_
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from zero_checkpoint.errors import DamagedCheckpoint
from zero_checkpoint.files.fetches import Fetches
from zero_checkpoint.files.meter import Meter
from zero_checkpoint.files.place import Place, open_again, open_source
from zero_checkpoint.files.source import Source, Span
from zero_checkpoint.files.writer import BlockHasher
from zero_checkpoint.format.dtypes import byte_view, host_bytes
from zero_checkpoint.format.manifest import FileRecord, Manifest
from zero_checkpoint.format.match import resolve
from zero_checkpoint.format.pieces import PARAM, Piece, State
from zero_checkpoint.format.plan import READ_BYTES, PlannedPart, Read, cut, plan
from zero_checkpoint.format.table import describe, extents, table_of, uncollected
from zero_comm.worker.agent_link import preparing

_log = logging.getLogger(__name__)

_SHOWN = 4
DAMAGE = frozenset({errno.ENOENT, errno.EIO})
"""Errors of reading a damaged checkpoint; any other error is a problem of this node."""


Opener = Callable[[], AbstractContextManager[Source]]
"""Opens one copy of a file; raises OSError."""
Copies = Callable[[str], Sequence[Opener]]
"""From a file's name to its copies, in the order of trying; none: the file is lost."""


def fill(
    directory: Place,
    manifest: Manifest,
    state: State,
    *,
    copies: Copies | None = None,
    weights_filled: Callable[[], None] = lambda: None,
    log_progress: bool = False,
) -> int:
    """Read `state.pieces` in place; returns how many bytes were read from files.

    `copies` of each file; None: the one in `directory`. `weights_filled` is called when all weights
    are filled and verified, before the rest is read.

    Raises:
        ModelMismatch: See `match.resolve`; nothing was read.
        CheckpointError: A wanted piece is not storable, see `extents`.
        DamagedCheckpoint: Names file, block, tensors and ranges of elements.
        OSError: This rank could not read, for a reason other than damage.
    """
    with uncollected():
        stored_at = resolve(state, manifest)
        given = extents(state.pieces, table_of(state.tensors))
        wants = given._replace(tensor=stored_at[given.tensor])
        reads = plan(wants, manifest.fragments, len(manifest.tensors), manifest.block_bytes)
        # One part may fill several targets that lie side by side in memory, all of one allocation.
        memory = wants.memory.tolist()
        of_weights = {m for m, p in zip(memory, state.pieces, strict=True) if p.id.kind == PARAM}
        held = [each in of_weights for each in memory]
        first = [any(held[part.want] for part in read.parts) for read in reads]
        # The weights first: their owner can pass them on while the rest is read.
        weights, others = list(compress(reads, first)), list(compress(reads, map(not_, first)))
    with closing(Fetches()) as ahead:

        def only_copy(name: str) -> Sequence[Opener]:
            path = directory / name
            return [lambda: open_source(path, ahead), lambda: open_again(path)]

        sizes = (span(manifest, manifest.files[read.file], read.blocks)[1] for read in reads)
        what = f"loading {directory.name}"
        meter = Meter(what, sum(sizes), logs=log_progress, tell=preparing)
        reader = _Reader(directory, manifest, state.pieces, copies or only_copy, meter)
        if copies is None and isinstance(directory, Path):
            files = manifest.files
            paths = [directory / file.name for file in files]
            ahead.expect(
                (paths[read.file], span(manifest, files[read.file], read.blocks))
                for read in [*weights, *others]
            )
        count = reader.read(weights)
        weights_filled()
        return count + reader.read(others)


def span(manifest: Manifest, file: FileRecord, blocks: range) -> Span:
    """The range of bytes of consecutive blocks of a file."""
    begin, end = (at * manifest.block_bytes for at in (blocks.start, blocks.stop))
    return begin, min(end, file.size_bytes) - begin


def _reads_into(target: Tensor) -> bool:
    """Whether the kernel reads into a tensor; else its bytes are copied once they are verified."""
    return target.is_cpu


class _Reader:
    def __init__(
        self,
        directory: Place,
        manifest: Manifest,
        pieces: Sequence[Piece],
        copies: Copies,
        meter: Meter,
    ) -> None:
        self._directory = directory
        self._meter = meter
        self._copies = copies
        self._manifest = manifest
        self._pieces = pieces
        # For what a read has beside its targets; a device's bytes are here until they are verified.
        longest = max((file.size_bytes for file in manifest.files), default=0)
        read_bytes = max(READ_BYTES, manifest.block_bytes)
        self._scratch = torch.empty(min(longest, read_bytes), dtype=torch.uint8, device="cpu")

    def read(self, reads: Iterable[Read]) -> int:
        """Carry out reads, those of a file from its first good copy; returns the bytes read."""
        count = 0
        for number, group in groupby(reads, key=lambda read: read.file):
            file, of_file = self._manifest.files[number], list(group)
            # A block counts as damaged only if a second read, past the page cache, finds the same.
            damage: DamagedCheckpoint | None = None
            for copy in self._copies(file.name):
                if damage is not None:
                    _log.warning("read once more, past the cache or from another copy: %s", damage)
                try:
                    count += self._read_copy(copy, file, of_file)
                    if damage is not None:
                        _log.warning(
                            "the second read was good: %s has read what was not saved; its memory, "
                            "its disk or the way to it fails, or a copy in memory is damaged",
                            socket.gethostname(),
                        )
                    break
                except DamagedCheckpoint as error:
                    damage = error
            else:
                # No copy was whole, or there was none at all.
                raise damage or self._damage(file, of_file[0], 0, "is held by no node any more")
        return count

    def _read_copy(self, copy: Opener, file: FileRecord, reads: list[Read]) -> int:
        read, count = reads[0], 0
        try:
            with copy() as source:
                source.expect([span(self._manifest, file, read.blocks) for read in reads])
                for read in reads:
                    length = self._read(source, file, read)
                    count += length
                    self._meter.add(length)
        except OSError as error:
            if error.errno not in DAMAGE:
                raise
            raise self._damage(file, read, 0, f"cannot be read: {error.strerror}") from error
        return count

    def _read(self, source: Source, file: FileRecord, read: Read) -> int:
        """Carry out one read, and verify it; returns the bytes read."""
        begin, length = span(self._manifest, file, read.blocks)
        # The memory of the bytes in order: the targets, and scratch between them.
        scratch = host_bytes(self._scratch)
        buffers, at = [], 0
        for part in read.parts:
            offset = part.offset - begin
            target = self._target(part)
            here = scratch[offset : offset + part.length]
            buffers += [scratch[at:offset], host_bytes(target) if _reads_into(target) else here]
            at = offset + part.length
        buffers = [buffer for buffer in [*buffers, scratch[at:length]] if buffer]
        try:
            missing = source.read_into(buffers, begin)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            if len(read.blocks) == 1:
                raise self._damage(file, read, 0, f"cannot be read: {error.strerror}") from error
            # Block by block, to find the unreadable one.
            blocks = cut(read.file, read.parts, self._manifest.block_bytes, most_blocks=1)
            return sum(self._read(source, file, block) for block in blocks)
        if missing:
            block = (length - missing) // self._manifest.block_bytes
            raise self._damage(file, read, block, f"ends {missing} bytes too early")
        hasher = BlockHasher(self._manifest.block_bytes)
        for buffer in buffers:
            hasher.update(buffer)
        expected = file.digests[read.blocks[0] : read.blocks.stop]
        # The first damaged block is named: it is enough to give up this copy.
        for block in np.flatnonzero(hasher.digests() != expected)[:1].tolist():
            raise self._damage(file, read, block, "is not what was saved (XXH3-64 differs)")
        for part in read.parts:
            target = self._target(part)
            if not _reads_into(target):
                at = part.offset - begin
                target.copy_(self._scratch[at : at + part.length])
        return length

    def _target(self, part: PlannedPart) -> Tensor:
        """The memory of a part in its target: uint8 [its length]."""
        data = byte_view(self._pieces[part.want].data)
        return data.as_strided((part.length,), (1,), data.storage_offset() + part.at)

    def _damage(self, file: FileRecord, read: Read, at: int, problem: str) -> DamagedCheckpoint:
        """The error for the `at`-th block of a read."""
        block, size = read.blocks[at], self._manifest.block_bytes
        begin, end = block * size, min((block + 1) * size, file.size_bytes)
        ranges = contents(self._manifest, read.file, begin, end)
        more = f" and {len(ranges) - _SHOWN} more" if len(ranges) > _SHOWN else ""
        error = DamagedCheckpoint(
            f"{self._directory / file.name}: block {block} (bytes {begin}:{end}) {problem}; "
            f"it holds {', '.join(ranges[:_SHOWN])}{more}"
        )
        error.where = read.file, block
        return error


def contents(manifest: Manifest, file: int, begin: int, end: int) -> list[str]:
    """The elements of tensors in bytes [begin, end) of a file, for messages."""
    rows, tensors = manifest.fragments, list(manifest.tensors)
    widths = table_of(manifest.tensors).itemsizes[rows.tensor]
    # Elements before the byte, then elements that start before the end; cut to the fragment.
    low = np.maximum((begin - rows.offset) // widths, 0)
    high = np.minimum(-((rows.offset - end) // widths), rows.length)
    first, length = rows.start + low, high - low
    return [
        describe(tensors[rows.tensor[row]], int(first[row]), int(length[row]))
        for row in np.flatnonzero((rows.file == file) & (length > 0)).tolist()
    ]
