"""Ranged reads from one file of a checkpoint, wherever it lies.

Must always hold: a source delivers the bytes of its file or fewer, never other ones; whoever
reads verifies them. Errors are OSErrors: ENOENT and EIO mean that the file is damaged, anything
else that it could not be reached.

Implemented by `local_file`, `objects` and `ram.ram_peers`; opened by `place.open_source`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Span = tuple[int, int]
"""A range of bytes: where it begins, how many."""


class Source(Protocol):
    """An open file."""

    def expect(self, spans: Sequence[Span]) -> None:
        """What will be read next, each span once and in this order: a hint to fetch it ahead.

        It may be all of a file: a source bounds what it holds in memory.
        """

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Scatter the file's bytes from `offset` into the buffers; returns how many it lacks."""
