"""Memory that a save is copied into, so that training goes on while it is written.

A staging buffer is mapped memory, reused from save to save; a frozen image in it is byte for byte
the file that goes to disk, or that is a checkpoint in memory. `room` says where the memory comes
from.

Must always hold: a chunk of an image is read only when all of it is copied; who waits for one hears
of it when the copy is broken off.

Called by `saver` and `memory.tier`, on every rank.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.chunks import Copy, chunks_of, copies, halves
from zero_checkpoint.format.layout import FileLayout
from zero_checkpoint.staging_memory import StagingMemory

_GRAIN_BYTES = 2 << 20
"""Capacities are multiples of it: a step count that grows by a digit needs no new buffer."""


@dataclass(frozen=True, slots=True)
class FrozenImage:
    """A copy of the state as of one moment, see `writer.Image`."""

    layout: FileLayout
    path: Path | None
    """The file of its memory, if it has one, for as long as the staging buffer is not closed."""
    copied: Sequence[Future[memoryview]]
    """Its memory in halves, each once it is copied. To read it from the first chunk on would make
    it durable sooner, but slow the copy, for which training waits, by a fifth."""

    def chunks(self) -> Iterator[memoryview]:
        """As `writer.Image.chunks`, each once it is copied.

        Raises:
            CheckpointError: The copy was broken off.
        """
        for part in self.copied:
            try:
                yield from chunks_of(part.result())
            except CancelledError:
                raise CheckpointError("the copy of the state was broken off") from None


class StagingBuffer:
    """The staging buffer of one rank. One image at a time: the next `snapshot` overwrites it."""

    def __init__(self, room: StagingMemory) -> None:
        """Nothing is reserved before the first `snapshot`."""
        self._room = room
        self._memory: mmap.mmap | None = None
        self._plan: _Plan | None = None

    def snapshot(
        self, layout: FileLayout, begin: Callable[[FrozenImage], object] = lambda _: None
    ) -> FrozenImage:
        """Copy what is placed in a layout; when this returns, the tensors may change.

        Args:
            layout: Says what goes where.
            begin: Given the image before anything is copied, to begin reading it elsewhere.

        Raises:
            NoStagingMemory: There is no room; `begin` was not called.
        """
        if self._memory is None or len(self._memory) < layout.size_bytes:
            self.close()
            grains = -(-layout.size_bytes // _GRAIN_BYTES)
            self._memory = self._room.reserve(grains * _GRAIN_BYTES)
        if self._plan is None or self._plan.layout is not layout:
            rooms = halves(memoryview(self._memory)[: layout.size_bytes])
            self._plan = _Plan(layout, list(copies(layout, rooms)))
        image = FrozenImage(layout, self._room.path, [Future() for _ in self._plan.copies])
        try:
            begin(image)
            for part, copy in zip(image.copied, self._plan.copies, strict=True):
                part.set_result(copy.make())
        finally:
            for part in image.copied:
                part.cancel()  # does nothing to those that are done
        return image

    def forget(self) -> None:
        """Let go of the tensors of the last image, but not of its memory."""
        self._plan = None

    def close(self) -> None:
        """Give the memory back; an image that is still being read stays until it is not."""
        self._room.release()
        self._memory = self._plan = None


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to copy where, kept for the next image of the same layout."""

    layout: FileLayout
    copies: Sequence[Copy]
