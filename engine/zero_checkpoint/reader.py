"""Fills pieces from the files of a checkpoint, believing no byte that it has not verified.

The weights come first: their owner can pass them on while the rest is read.

Must always hold: `fill` returns only if every block that it touched has the digest that the
manifest names. Host tensors are read into before that is known, so after a failure the pieces
hold anything; the caller then fills all of them from another checkpoint. The safetensors
headers are not needed and not read, except as bytes of the blocks that they share with data.

Called by `restore` on every rank.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from itertools import compress, groupby
from operator import not_
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from zero_checkpoint.errors import DamagedCheckpoint
from zero_checkpoint.files.fetches import Fetches
from zero_checkpoint.files.place import Place, open_source
from zero_checkpoint.files.source import Source, Span
from zero_checkpoint.files.writer import BlockHasher
from zero_checkpoint.format.dtypes import byte_view, host_bytes
from zero_checkpoint.format.manifest import FileRecord, Manifest
from zero_checkpoint.format.match import resolve
from zero_checkpoint.format.pieces import PARAM, Piece, State
from zero_checkpoint.format.plan import READ_BYTES, Part, Read, cut, plan
from zero_checkpoint.format.table import describe, extents, table_of, uncollected

_log = logging.getLogger(__name__)

_SHOWN = 4
_DAMAGE = frozenset({errno.ENOENT, errno.EIO})
"""What reading a damaged checkpoint fails with; any other error is this node's own problem."""


Opener = Callable[[], AbstractContextManager[Source]]
"""Opens one copy of a file; raises OSError."""
Copies = Callable[[str], Sequence[Opener]]
"""From a file's name to its copies, those to be tried first in front; none: it is lost."""


def fill(
    directory: Place,
    manifest: Manifest,
    state: State,
    *,
    copies: Copies | None = None,
    weights_filled: Callable[[], None] = lambda: None,
) -> int:
    """Read `state.pieces` in place; returns how many bytes were read from files.

    Args:
        directory: Of the checkpoint; for messages, and where its files are by default.
        manifest: Of the checkpoint.
        state: What to fill.
        copies: Where the files are, if there is more than one copy of each or they are elsewhere.
        weights_filled: Called when all weights are there, verified, and the rest is to be read.

    Raises:
        ModelMismatch: See `match.resolve`; nothing was read.
        CheckpointError: A wanted piece is not storable, see `extents`.
        DamagedCheckpoint: Names file, block, tensors and ranges of elements.
        OSError: This rank could not read, for a reason other than damage.
    """
    weights, others = _plan(state, manifest)
    with closing(Fetches()) as ahead:
        reader = _Reader(directory, manifest, state.pieces, copies or _only_copy(directory, ahead))
        if copies is None and isinstance(directory, Path):
            ahead.expect(_ranges(directory, manifest, [*weights, *others]))
        count = reader.read(weights)
        weights_filled()
        return count + reader.read(others)


@uncollected()
def _plan(state: State, manifest: Manifest) -> tuple[list[Read], list[Read]]:
    """The reads that weights need, and the others; each by file and position."""
    stored_at = resolve(state, manifest)
    given = extents(state.pieces, table_of(state.tensors))
    wants = given._replace(tensor=stored_at[given.tensor])
    reads = plan(wants, manifest.fragments, len(manifest.tensors), manifest.block_bytes)
    # A part may reach into targets that follow its own, but only in the same allocation.
    weights = np.array([piece.id.kind == PARAM for piece in state.pieces], dtype=bool)
    held = np.isin(wants.memory, wants.memory[weights]).tolist()
    first = [any(held[part.want] for part in read.parts) for read in reads]
    return list(compress(reads, first)), list(compress(reads, map(not_, first)))


def _only_copy(directory: Place, ahead: Fetches) -> Copies:
    return lambda name: [lambda: open_source(directory / name, ahead)]


def _ranges(
    directory: Path, manifest: Manifest, reads: Iterable[Read]
) -> Iterator[tuple[Path, Span]]:
    """What will be read, in order."""
    paths = [directory / file.name for file in manifest.files]
    for read in reads:
        yield paths[read.file], span(manifest, manifest.files[read.file], read.blocks)


def span(manifest: Manifest, file: FileRecord, blocks: range) -> Span:
    """Where blocks of a file lie in it."""
    begin, end = (at * manifest.block_bytes for at in (blocks.start, blocks.stop))
    return begin, min(end, file.size_bytes) - begin


def _reads_into(target: Tensor) -> bool:
    """Whether the kernel can; else the bytes are copied there once they are verified."""
    return target.is_cpu


class _Reader:
    def __init__(
        self, directory: Place, manifest: Manifest, pieces: Sequence[Piece], copies: Copies
    ) -> None:
        self._directory = directory
        self._copies = copies
        self._manifest = manifest
        self._pieces = pieces
        longest = max((file.size_bytes for file in manifest.files), default=0)
        read_bytes = max(READ_BYTES, manifest.block_bytes)
        self._scratch = torch.empty(min(longest, read_bytes), dtype=torch.uint8)

    def read(self, reads: Iterable[Read]) -> int:
        """Carry out reads, those of a file together; returns the bytes read."""
        return sum(
            self._read_file(self._manifest.files[file], list(group))
            for file, group in groupby(reads, key=lambda read: read.file)
        )

    def _read_file(self, file: FileRecord, reads: list[Read]) -> int:
        """Carry out the reads of one file, from its first good copy."""
        damage: DamagedCheckpoint | None = None
        for copy in self._copies(file.name):
            if damage is not None:
                _log.warning("another copy is read: %s", damage)
            try:
                return self._read_copy(copy, file, reads)
            except DamagedCheckpoint as error:
                damage = error
        raise damage or self._damage(file, reads[0], 0, "is held by nobody any more")

    def _read_copy(self, copy: Opener, file: FileRecord, reads: list[Read]) -> int:
        read, count = reads[0], 0
        try:
            with copy() as source:
                source.expect([span(self._manifest, file, read.blocks) for read in reads])
                for read in reads:
                    count += self._read(source, file, read)
        except OSError as error:
            if error.errno not in _DAMAGE:
                raise
            raise self._damage(file, read, 0, f"cannot be read: {error.strerror}") from error
        return count

    def _read(self, source: Source, file: FileRecord, read: Read) -> int:
        """Carry out one read, and verify it; returns the bytes read."""
        begin, length = span(self._manifest, file, read.blocks)
        buffers = self._buffers(read.parts, begin, length)
        try:
            missing = source.read_into(buffers, begin)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return self._read_singly(source, file, read, error)
        if missing:
            block = (length - missing) // self._manifest.block_bytes
            raise self._damage(file, read, block, f"ends {missing} bytes too early")
        hasher = BlockHasher(self._manifest.block_bytes)
        for buffer in buffers:
            hasher.update(buffer)
        expected = file.digests[read.blocks[0] : read.blocks.stop]
        for block in np.flatnonzero(hasher.digests() != expected)[:1].tolist():
            raise self._damage(file, read, block, "is not what was saved (XXH3-64 differs)")
        for part in read.parts:
            self._copy_to_device(part, part.offset - begin)
        return length

    def _read_singly(self, source: Source, file: FileRecord, read: Read, error: OSError) -> int:
        """Find out which block of a read that failed is to blame."""
        if len(read.blocks) == 1:
            raise self._damage(file, read, 0, f"cannot be read: {error.strerror}") from error
        blocks = cut(read.file, read.parts, self._manifest.block_bytes, most_blocks=1)
        return sum(self._read(source, file, block) for block in blocks)

    def _buffers(self, parts: Sequence[Part], begin: int, length: int) -> list[memoryview]:
        """Where the bytes of a read go, in order: to the targets, or between them to scratch."""
        scratch = host_bytes(self._scratch)
        buffers, at = [], 0
        for part in parts:
            offset = part.offset - begin
            target = self._target(part)
            here = scratch[offset : offset + part.length]
            buffers += [scratch[at:offset], host_bytes(target) if _reads_into(target) else here]
            at = offset + part.length
        return [buffer for buffer in [*buffers, scratch[at:length]] if buffer]

    def _target(self, part: Part) -> Tensor:
        """Where a part goes: uint8 [its length]."""
        data = byte_view(self._pieces[part.want].data)
        return data.as_strided((part.length,), (1,), data.storage_offset() + part.at)

    def _copy_to_device(self, part: Part, offset: int) -> None:
        target = self._target(part)
        if not _reads_into(target):
            target.copy_(self._scratch[offset : offset + part.length])

    def _damage(self, file: FileRecord, read: Read, at: int, problem: str) -> DamagedCheckpoint:
        """What to say of the `at`-th block of a read."""
        block, size = read.blocks[at], self._manifest.block_bytes
        begin, end = block * size, min((block + 1) * size, file.size_bytes)
        ranges = contents(self._manifest, read.file, begin, end)
        more = f" and {len(ranges) - _SHOWN} more" if len(ranges) > _SHOWN else ""
        return DamagedCheckpoint(
            f"{self._directory / file.name}: block {block} (bytes {begin}:{end}) {problem}; "
            f"it holds {', '.join(ranges[:_SHOWN])}{more}"
        )


def contents(manifest: Manifest, file: int, begin: int, end: int) -> list[str]:
    """Which elements of which tensors lie in bytes [begin, end) of a file, for messages."""
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
