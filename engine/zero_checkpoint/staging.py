"""What lets training continue during a save: a snapshot of the state, and a thread that saves it.

A staging buffer is mapped memory, reused from save to save; a frozen image in it is byte for byte
the file that goes to disk, or that is a checkpoint in memory. `staging_memory` allocates it.

Must always hold: a chunk of an image is read only when all of it is copied; a reader that waits
for one receives an error when the copy is broken off. At most one save of a rank is in flight. Its
outcome, a path or an error, is returned once, by `wait` or by `finished`, and never lost; a save in
flight when the interpreter ends is finished first (`concurrent.futures` joins its threads there).
No thread is killed: a save ends by the deadlines of its votes, or when their `on_wait` raises.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.chunks import Copy, chunks_of, copies, halves
from zero_checkpoint.files.place import Place
from zero_checkpoint.format.layout import FileLayout
from zero_checkpoint.staging_memory import StagingMemory

_GRAIN_BYTES = 2 << 20
"""Capacities are multiples of it: a step count that grows by a digit needs no new buffer."""


@dataclass(frozen=True, slots=True)
class FrozenImage:
    """A snapshot of the state, see `writer.Image`."""

    layout: FileLayout
    path: Path | None
    """The file of its memory, if it has one, until the staging buffer is closed."""
    copied: Sequence[Future[memoryview]]
    """Its memory in halves, each once it is copied. To read it from the first chunk on would make
    it durable sooner, but slow the copy, for which training waits, by a fifth."""

    def chunks(self) -> Iterator[memoryview]:
        """All chunks in order, each once it is copied; see `writer.Image.chunks`.

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

    def __init__(self, source: StagingMemory) -> None:
        """No memory is allocated before the first `snapshot`."""
        self._source = source
        self._memory: mmap.mmap | None = None
        self._plan: _Plan | None = None

    def snapshot(
        self, layout: FileLayout, begin: Callable[[FrozenImage], object] = lambda _: None
    ) -> FrozenImage:
        """Copy the tensors of a layout; when this returns, the tensors may change.

        Args:
            layout: The tensors and their places in the image.
            begin: Called with the image before anything is copied, to begin reading it elsewhere.

        Raises:
            NoStagingMemory: There is too little memory; `begin` was not called.
        """
        if self._memory is None or len(self._memory) < layout.size_bytes:
            self.close()
            grains = -(-layout.size_bytes // _GRAIN_BYTES)
            self._memory = self._source.reserve(grains * _GRAIN_BYTES)
        if self._plan is None or self._plan.layout is not layout:
            buffers = halves(memoryview(self._memory)[: layout.size_bytes])
            self._plan = _Plan(layout, list(copies(layout, buffers)))
        image = FrozenImage(layout, self._source.path, [Future() for _ in self._plan.copies])
        try:
            begin(image)
            for part, copy in zip(image.copied, self._plan.copies, strict=True):
                part.set_result(copy.make())
        finally:
            for part in image.copied:
                part.cancel()  # does nothing to parts that are done
        return image

    def forget(self) -> None:
        """Drop the references to the tensors of the last image; its memory stays."""
        self._plan = None

    def close(self) -> None:
        """Free the memory; an image that is still being read stays until the reader is done."""
        self._source.release()
        self._memory = self._plan = None


@dataclass(frozen=True, slots=True)
class _Plan:
    """The copies of a layout, kept for the next image of the same layout."""

    layout: FileLayout
    copies: Sequence[Copy]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a save: a rank's write, or what rank 0 does with the files of all ranks."""

    size_bytes: int
    took_s: float
    ended_s: float
    """When it ended, by the monotonic clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a save ended."""

    step: int
    write_s: float
    """Seconds from its beginning to its end in the background."""
    ended_s: float = 0.0
    """When it ended, by the monotonic clock."""
    own: Part | None = None
    """The write of this rank's file, without the votes."""
    whole: Part | None = None
    """On rank 0, the check of the files of all ranks and the publication."""
    path: Place | None = None
    error: Exception | None = None


class Background:
    """The thread of a rank's saves; one save at a time."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="zero-checkpoint")
        self._running: Future[Outcome] | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._running is not None and not self._running.done()

    def start(self, step: int, save: Callable[[], Place]) -> None:
        """Begin a save; the outcome of the one before must have been taken."""
        assert self._running is None, "take the outcome of the save before"

        def run() -> Outcome:
            begin = time.monotonic()
            try:
                path = save()
                end_s = time.monotonic()
                return Outcome(step=step, path=path, write_s=end_s - begin, ended_s=end_s)
            except Exception as error:
                end_s = time.monotonic()
                return Outcome(step=step, error=error, write_s=end_s - begin, ended_s=end_s)

        self._running = self._threads.submit(run)

    def wait(self) -> Outcome | None:
        """The outcome of the save that was started last, once it has ended; None after that."""
        outcome = self._running.result() if self._running is not None else None
        self._running = None  # not before: if a signal handler raises, the outcome is not lost
        return outcome

    def finished(self) -> Outcome | None:
        """The outcome as of `wait`, or None at once if the save has not ended."""
        return None if self.busy else self.wait()

    def close(self) -> None:
        """End the thread, after the last save; no other may be started."""
        self._threads.shutdown()
