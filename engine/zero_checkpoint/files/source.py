"""Ranged reads from one file of a checkpoint: on a disk, in an object store, or on another node.

A source delivers the bytes of its file or fewer; the reader verifies them. Errors are OSErrors:
ENOENT and EIO mean that the file is damaged, any other errno that it could not be reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Span = tuple[int, int]
"""A range of bytes: first byte, length."""


class Source(Protocol):
    """An open file."""

    def expect(self, spans: Sequence[Span]) -> None:
        """Announce the next reads, each span once and in this order: a hint to prefetch them.

        The spans may cover all of a file: a source bounds what it holds in memory.
        """

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Scatter the file's bytes from `offset` into the buffers; how many bytes it lacks."""
