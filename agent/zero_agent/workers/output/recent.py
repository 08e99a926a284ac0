"""The last output of this node's workers, kept in memory for `zero-ctl logs`.

Kept by the agent, so it outlives every worker, and is complete after a `kill -9` of one. Chunks of
whole lines have numbers that grow by one, so a reader asks for what follows the last chunk that it
has. All methods may be called on any thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

LIMIT_BYTES = 1 << 20
"""Output that is kept of each worker, both streams together."""
_CHUNK_BYTES = 100
"""Memory of a chunk beside its text, about."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Whole lines that a worker has printed at once."""

    number: int
    time_s: float
    """This node's clock, seconds since the epoch."""
    round: int
    rank: int
    stream: str
    text: bytes

    def to_record(self) -> dict[str, Any]:
        """The chunk as it travels to `zero-ctl`."""
        return {
            "number": self.number,
            "time": round(self.time_s, 3),
            "round": self.round,
            "rank": self.rank,
            "stream": self.stream,
            "text": self.text.decode(errors="replace"),
        }


@dataclass(frozen=True, kw_only=True)
class Page:
    """Part of the output."""

    chunks: list[Chunk]
    """In the order in which they came."""
    number: int
    """The next page begins after this number."""
    lost: bool
    """Whether older output, which the reader does not have, is not kept any more."""


@dataclass
class _Kept:
    """The chunks of one worker."""

    chunks: deque[Chunk]
    size_bytes: int = 0
    dropped: dict[int, int] = field(default_factory=dict)
    """Rank -> number of its last chunk that had to make room."""

    def add(self, chunk: Chunk, limit_bytes: int) -> None:
        self.chunks.append(chunk)
        self.size_bytes += len(chunk.text) + _CHUNK_BYTES
        # The last chunk stays, however long it is: the reader shall see something.
        while self.size_bytes > limit_bytes and len(self.chunks) > 1:
            gone = self.chunks.popleft()
            self.size_bytes -= len(gone.text) + _CHUNK_BYTES
            self.dropped[gone.rank] = gone.number

    def last_lines(self, lines: int) -> Iterator[Chunk]:
        """The last lines, newest chunk first; the oldest chunk may be cut."""
        for chunk in reversed(self.chunks):
            if lines <= 0:
                return
            own = chunk.text.splitlines(keepends=True)
            text = b"".join(own[-lines:])
            yield chunk if len(own) <= lines else replace(chunk, text=text)
            lines -= len(own)


class RecentOutput:
    """The last output of all workers of one node, in all rounds of this agent."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._count = 0
        # A share for each worker: one that prints much displaces no output of another.
        self._by_local_rank: dict[int, _Kept] = {}

    def add(self, facts: Mapping[str, Any], text: bytes) -> None:
        """Keep whole lines of one worker."""
        with self._lock:
            self._count += 1
            chunk = Chunk(
                number=self._count,
                time_s=time.time(),
                round=facts["round"],
                rank=facts["rank"],
                stream=facts["stream"],
                text=text,
            )
            kept = self._by_local_rank.setdefault(facts["local_rank"], _Kept(deque()))
            kept.add(chunk, self._limit_bytes)

    def last(self, lines: int, limit_bytes: int, rank: int | None = None) -> Page:
        """The last lines of each worker, or of one rank; within the limit, the newest."""
        with self._lock:
            found = [
                chunk
                for kept in self._by_local_rank.values()
                for chunk in kept.last_lines(lines)
                if rank in (None, chunk.rank)
            ]
            count = self._count
        # Sorted without the lock, for which the thread that forwards all output would wait. Newest
        # first while the limit cuts, and in their order again on the page.
        newest = _within(limit_bytes, sorted(found, key=lambda chunk: -chunk.number))
        lost = len(newest) < len(found)
        return Page(chunks=newest[::-1], number=count, lost=lost)

    def after(self, number: int, limit_bytes: int, rank: int | None = None) -> Page:
        """The chunks after that of a number, the oldest first; within the limit, the oldest."""
        with self._lock:
            every = [
                chunk
                for kept in self._by_local_rank.values()
                for chunk in kept.chunks
                if chunk.number > number and rank in (None, chunk.rank)
            ]
            lost = any(
                dropped > number
                for kept in self._by_local_rank.values()
                for of_rank, dropped in kept.dropped.items()
                if rank in (None, of_rank)
            )
            count = self._count
        found = _within(limit_bytes, sorted(every, key=lambda chunk: chunk.number))
        # The next page begins after what had room on this one.
        if len(found) < len(every):
            count = found[-1].number
        return Page(chunks=found, number=count, lost=lost)


def _within(limit_bytes: int, chunks: list[Chunk]) -> list[Chunk]:
    """The first chunks, up to a size together; one at least."""
    found: list[Chunk] = []
    for chunk in chunks:
        limit_bytes -= len(chunk.text)
        if found and limit_bytes < 0:
            break
        found.append(chunk)
    return found
