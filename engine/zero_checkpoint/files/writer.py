"""Writes one rank's file from its image, hashed on the way, then fsynced.

An image is the bytes of the file, in order. There are two: `LiveImage` reads tensor memory while
training waits, chunk by chunk and without a second copy of the state; `staging.FrozenImage` reads a
snapshot while training continues.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import xxhash

from zero_checkpoint.files.chunks import copies, gather_buffers
from zero_checkpoint.files.meter import Meter
from zero_checkpoint.files.place import Place
from zero_checkpoint.files.storage import Disk
from zero_checkpoint.format.layout import FileLayout
from zero_checkpoint.format.manifest import Digests, FileRecord


class Image(Protocol):
    """The bytes of one rank's file."""

    @property
    def layout(self) -> FileLayout:
        """The positions of the tensors in the file."""

    def chunks(self) -> Iterator[memoryview]:
        """All bytes, in order, in parts of a size that suits the disk.

        A part stays unchanged until the next but one is requested.
        """


@dataclass(frozen=True, slots=True)
class LiveImage:
    """The tensors themselves; they must not change until the file is written."""

    layout: FileLayout
    buffers: Sequence[memoryview] = field(default_factory=gather_buffers)
    """Memory for two chunks; the next save uses it again, because fresh memory costs time."""

    def chunks(self) -> Iterator[memoryview]:
        """All bytes in order, gathered in the two buffers in turn; see `Image.chunks`."""
        for copy in copies(self.layout, itertools.cycle(self.buffers)):
            yield copy.make()


class BlockHasher:
    """XXH3-64 of each block of a stream."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._hash = xxhash.xxh3_64()
        self._filled = 0
        self._digests: list[bytes] = []

    def update(self, data: memoryview) -> None:
        """Hash the next bytes of the stream."""
        size, digest = self._block_bytes, xxhash.xxh3_64_digest
        begin = 0
        # The rest of a block that was begun; whole blocks at once; the begin of another one.
        if self._filled:
            begin = min(size - self._filled, len(data))
            self._begin_block(data[:begin])
        stop = begin + (len(data) - begin) // size * size
        self._digests += [digest(data[at : at + size]) for at in range(begin, stop, size)]
        if stop < len(data):
            self._begin_block(data[stop:])

    def _begin_block(self, part: memoryview) -> None:
        """Hash a part of a block, which may be the last part."""
        self._hash.update(part)
        self._filled += len(part)
        if self._filled == self._block_bytes:
            self._close_block()

    def digests(self) -> Digests:
        """One digest per block; call it once, at the end of the stream."""
        if self._filled:
            self._close_block()
        # xxhash writes the most significant byte first, whatever the machine is.
        return np.frombuffer(b"".join(self._digests), dtype=">u8").astype(np.uint64)

    def _close_block(self) -> None:
        self._digests.append(self._hash.digest())
        self._hash.reset()
        self._filled = 0


def write_file(
    path: Place, image: Image, block_bytes: int, disk: Disk, *, log_progress: bool = False
) -> FileRecord:
    """Write an image to a new file; it and its directory entry are durable on return.

    Each block of `block_bytes` gets a digest.

    Raises:
        OSError: Any operation failed; a partial file may be left.
    """
    hasher, layout = BlockHasher(block_bytes), image.layout
    meter = Meter(f"saving {path.parent.name}", layout.size_bytes) if log_progress else None

    def hashed() -> Iterator[memoryview]:
        for chunk in image.chunks():
            # The bytes that the kernel gets, and not the tensor's, which somebody may write to.
            hasher.update(chunk)
            yield chunk

    with disk.create(path) as file:
        # One chunk is written while the next one is gathered and hashed.
        for chunk in _ahead(hashed()):
            disk.write(file, chunk)
            if meter is not None:
                meter.add(len(chunk))
        disk.sync(file)
    disk.sync_directory(path.parent)
    return FileRecord(path.name, layout.size_bytes, len(layout.head), hasher.digests())


def _ahead(chunks: Iterator[memoryview]) -> Iterator[memoryview]:
    """The same chunks; each is made by another thread while the one before it is in use."""
    with ThreadPoolExecutor(1, "zero-chunks") as thread:
        coming = _begin(thread, chunks)
        while (chunk := coming.result()) is not None:
            coming = _begin(thread, chunks)
            yield chunk


def _begin(thread: ThreadPoolExecutor, chunks: Iterator[memoryview]) -> Future[memoryview | None]:
    """The next chunk, from the thread."""
    try:
        return thread.submit(next, chunks, None)
    except RuntimeError:
        # The interpreter ends and starts no threads, but a save in flight is finished first.
        made: Future[memoryview | None] = Future()
        made.set_result(next(chunks, None))
        return made
