"""Memory that a save is copied into, so that training goes on while it is written.

An arena is mapped memory, reused from save to save; a frozen image in it is byte for byte the file
that goes to disk, or that is a checkpoint in memory. `room` says where the memory comes from.

Called by `saver` and `ram_tier`, on every rank.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zero_engine.checkpoint.layout import FileLayout, parts
from zero_engine.checkpoint.room import Room

_GRAIN_BYTES = 2 << 20
"""Capacities are multiples of it: a step count that grows by a digit needs no new arena."""
_SLAB_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class FrozenImage:
    """A copy of the state as of one moment, see `writer.Image`."""

    layout: FileLayout
    memory: mmap.mmap
    """Begins with the image; may be longer."""
    path: Path | None
    """The file of this memory, if it has one, for as long as the arena is not closed."""

    def slabs(self) -> Iterator[memoryview]:
        """Parts of 16 MiB, each beginning on a page, as direct writing wants it."""
        whole = memoryview(self.memory)[: self.layout.size_bytes]
        for begin in range(0, len(whole), _SLAB_BYTES):
            yield whole[begin : begin + _SLAB_BYTES]


class Arena:
    """The arena of one rank. One image at a time: the next `freeze` overwrites it."""

    def __init__(self, room: Room) -> None:
        """Nothing is reserved before the first `freeze`."""
        self._room = room
        self._memory: mmap.mmap | None = None
        self._bytes: Tensor | None = None
        self._copy: _Copy | None = None

    def freeze(self, layout: FileLayout) -> FrozenImage:
        """Copy what is placed in a layout; when this returns, the tensors may change.

        Raises:
            NoArena: There is no room.
        """
        if self._memory is None or len(self._memory) < layout.size_bytes:
            self._reserve(layout.size_bytes)
        assert self._memory is not None
        assert self._bytes is not None
        if self._copy is None or self._copy.layout is not layout:
            self._copy = _plan(layout, self._bytes)
        torch._foreach_copy_(self._copy.targets, self._copy.sources)  # tensors may be many
        return FrozenImage(layout, self._memory, self._room.path)

    def forget(self) -> None:
        """Let go of the tensors of the last image, but not of its memory."""
        self._copy = None

    def close(self) -> None:
        """Give the memory back; an image that is still being read stays until it is not."""
        self._room.release()
        self._memory = self._bytes = self._copy = None

    def _reserve(self, size_bytes: int) -> None:
        self.close()
        self._memory = self._room.reserve(-(-size_bytes // _GRAIN_BYTES) * _GRAIN_BYTES)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class _Copy:
    """What to copy where, kept for the next image of the same layout."""

    layout: FileLayout
    targets: tuple[Tensor, ...]
    sources: list[Tensor]


def _plan(layout: FileLayout, memory: Tensor) -> _Copy:
    sources = list(parts(layout))
    targets = memory[: layout.size_bytes].split([part.numel() for part in sources])
    return _Copy(layout, targets, sources)
