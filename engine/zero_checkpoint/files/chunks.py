"""The bytes of a file, copied from the tensors into memory that suits the disk: huge pages.

Direct reads and writes cost less with huge pages, because the kernel has fewer pages to pin. Chunks
begin on a page, and all but the last of a file have one size, as direct writing needs it.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zero_checkpoint.format.layout import FileLayout, parts

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
CHUNK_BYTES = 16 << 20
"""Bytes of a chunk of a finished copy: large, so that the disk hardly waits between two chunks."""
GATHER_BYTES = 4 << 20
"""Bytes of a chunk that is gathered for the disk: two of them stay in the processor's cache, from
which the disk reads them. With larger ones, disk and copying compete for the memory: measured a
tenth slower."""


def has_huge_pages() -> bool:
    """Whether the kernel gives huge pages to a process that asks for them (madvise)."""
    try:
        return "[never]" not in SETTING.read_text()
    except OSError:  # a kernel without them
        return False


def zeros(size_bytes: int) -> mmap.mmap:
    """Zeros that begin on a page; the memory is freed with its last reference."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    # Or each page that is written to while a child lives would be copied once.
    memory.madvise(mmap.MADV_DONTFORK)
    return memory


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy to be made, from tensors to memory."""

    memory: memoryview
    targets: tuple[Tensor, ...]
    """uint8 vectors that fill `memory`."""
    sources: list[Tensor]

    def make(self) -> memoryview:
        """Copy the bytes as they are now; returns the memory."""
        torch._foreach_copy_(self.targets, self.sources)  # tensors may be many
        return self.memory

    def begin(self) -> None:
        """The same from devices to pinned memory, on their current streams; nobody waits."""
        # torch refuses an empty list, which either part of a divided copy may be.
        if self.sources:
            torch._foreach_copy_(self.targets, self.sources, non_blocking=True)


def copies(layout: FileLayout, buffers: Iterable[memoryview]) -> Iterator[Copy]:
    """All of a file as copies that fill one buffer each; only the last may be shorter."""
    vectors = parts(layout)
    # Of the vector that a buffer ends in: what the next buffer begins with.
    rest = nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    for buffer in buffers:
        sources, free = [], len(buffer)
        while free and (rest.numel() or (rest := next(vectors, nothing)).numel()):
            sources.append(rest[:free])
            rest, free = rest[free:], free - sources[-1].numel()
        if not sources:
            return
        memory = buffer[: len(buffer) - free]
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        yield Copy(memory, whole.split([source.numel() for source in sources]), sources)


def gather_buffers() -> tuple[memoryview, memoryview]:
    """Two buffers of one chunk each; the kernel allocates their pages as they are written to."""
    memory = memoryview(zeros(2 * GATHER_BYTES))
    return memory[:GATHER_BYTES], memory[GATHER_BYTES:]


def halves(memory: memoryview) -> list[memoryview]:
    """The memory as two buffers of whole chunks, or as one if it is shorter than two chunks."""
    middle = len(memory) // 2 // CHUNK_BYTES * CHUNK_BYTES
    return [half for half in (memory[:middle], memory[middle:]) if half]


def chunks_of(memory: memoryview) -> Iterator[memoryview]:
    """A filled buffer, cut into chunks."""
    for begin in range(0, len(memory), CHUNK_BYTES):
        yield memory[begin : begin + CHUNK_BYTES]
