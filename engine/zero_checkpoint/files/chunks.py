"""The bytes of a file, copied from wherever they are into memory that the disk likes.

Must always hold: the copies of a file follow each other as its bytes do. Chunks begin on a page,
and all but the last of a file are of one size, as direct writing wants it.

Called by `staging`, which has room for a whole file, and `writer`, which has room for two chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_checkpoint.files.huge_pages import zeros
from zero_checkpoint.format.layout import FileLayout, parts

CHUNK_BYTES = 16 << 20
"""Of memory that is there: large, so that the disk hardly waits between two of them."""
ROOM_BYTES = 4 << 20
"""Of what is gathered for the disk: two of them stay in the processor's cache, and the disk takes
them from there. With larger ones, disk and copying compete for the memory: a tenth slower here."""


@dataclass(frozen=True, slots=True)
class Copy:
    """What to copy to where."""

    memory: memoryview
    targets: tuple[Tensor, ...]
    """uint8 vectors that fill `memory`."""
    sources: list[Tensor]

    def make(self) -> memoryview:
        """The bytes as they are now."""
        torch._foreach_copy_(self.targets, self.sources)  # tensors may be many
        return self.memory


def copies(layout: FileLayout, rooms: Iterable[memoryview]) -> Iterator[Copy]:
    """All of a file, cut so that each room is filled, but for the last."""
    vectors = parts(layout)
    rest = nothing = torch.empty(0, dtype=torch.uint8)
    for room in rooms:
        sources, free = [], len(room)
        while free and (rest.numel() or (rest := next(vectors, nothing)).numel()):
            sources.append(rest[:free])
            rest, free = rest[free:], free - sources[-1].numel()
        if not sources:
            return
        memory = room[: len(room) - free]
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        yield Copy(memory, whole.split([source.numel() for source in sources]), sources)


def two_memories() -> tuple[memoryview, memoryview]:
    """Room for two chunks; takes memory only as it is written to."""
    memory = memoryview(zeros(2 * ROOM_BYTES))
    return memory[:ROOM_BYTES], memory[ROOM_BYTES:]


def halves(memory: memoryview) -> list[memoryview]:
    """Two rooms of whole chunks, or one where there is only one chunk."""
    middle = len(memory) // 2 // CHUNK_BYTES * CHUNK_BYTES
    return [room for room in (memory[:middle], memory[middle:]) if room]


def chunks_of(memory: memoryview) -> Iterator[memoryview]:
    """Filled rooms, cut into chunks."""
    for begin in range(0, len(memory), CHUNK_BYTES):
        yield memory[begin : begin + CHUNK_BYTES]
