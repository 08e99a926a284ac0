"""Snapshots of the state, and the thread that saves them while training continues.

A staging buffer is mapped memory, reused from save to save; a frozen image in it is byte for byte
the file that goes to disk, or that is a checkpoint in memory. `staging_memory` allocates it,
`copiers` fills it.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.chunks import chunks_of, copies, halves
from zero_checkpoint.files.place import Place
from zero_checkpoint.format.layout import FileLayout
from zero_checkpoint.saving.copiers import (
    BeforeChange,
    Begun,
    Choose,
    Copier,
    await_copy,
    copier_of,
    device_of,
)
from zero_checkpoint.saving.staging_memory import NoStagingMemory, StagingMemory

_GRAIN_BYTES = 2 << 20
"""Capacities are multiples of it: a step count that grows by a digit needs no new buffer."""
_MEANWHILE_S = 5.0
WRITE, PUBLISH = "write", "publish"
"""The parts of a save: a rank's write, and what rank 0 does with the files of all ranks."""
OnPart = Callable[[str, int, float], None]
"""Called with a part of a save that has ended, its bytes and its seconds."""


@dataclass(frozen=True, slots=True)
class FrozenImage:
    """A snapshot of the state, see `writer.Image`."""

    layout: FileLayout
    path: Path | None
    """The file of its memory, if it has one, until the staging buffer is closed."""
    copied: Sequence[Future[Begun]]
    """Its memory in halves, each once its copy has begun. To read it from the first chunk on would
    make it durable sooner, but slow the copy, for which training waits, by a fifth."""
    on_wait: Callable[[], object] = lambda: None
    """Called while a device copies; may raise."""

    def chunks(self) -> Iterator[memoryview]:
        """All chunks in order, each once it is copied; see `writer.Image.chunks`.

        Raises:
            CheckpointError: The copy was broken off, or failed.
        """
        for part in self.copied:
            try:
                copy = part.result()
            except CancelledError:
                raise CheckpointError("the copy of the state was broken off") from None
            yield from chunks_of(await_copy(copy, self.on_wait))


class StagingBuffer:
    """The staging buffer of one rank. One image at a time: the next `snapshot` overwrites it."""

    def __init__(
        self,
        source: StagingMemory,
        *,
        before_change: BeforeChange | None = None,
        on_wait: Callable[[], object] = lambda: None,
        choose: Choose = copier_of,
    ) -> None:
        """No memory is allocated before the first `snapshot`.

        `before_change` gets `hold`; None: the state may change at any time. `on_wait` is called
        while a reader of an image waits for a device; may raise.
        """
        self._source = source
        self._memory: mmap.mmap | None = None
        self._plan: _Plan | None = None
        self._copier: Copier | None = None
        self._device: torch.device | None = None
        self._beside = before_change is not None
        self._on_wait = on_wait
        self._choose = choose
        if before_change is not None:
            before_change.append(self.hold)

    def snapshot(
        self, layout: FileLayout, begin: Callable[[FrozenImage], object] = lambda _: None
    ) -> FrozenImage:
        """Copy the tensors of a layout; when this returns, they may change after a `hold`.

        `begin` is called with the image before anything is copied, to begin reading it elsewhere.

        Raises:
            NoStagingMemory: There is too little memory; `begin` was not called.
        """
        plan = self._prepare(layout)
        copied: list[Future[Begun]] = [Future() for _ in plan.copies]
        image = FrozenImage(layout, self._source.path, copied, self._on_wait)
        try:
            begin(image)
            for part, begin_copy in zip(image.copied, plan.copies, strict=True):
                part.set_result(begin_copy())
        finally:
            # After an error nobody makes them any more: a reader that waits for one goes on.
            for part in image.copied:
                part.cancel()  # does nothing to parts that are done
        return image

    def _prepare(self, layout: FileLayout) -> _Plan:
        """The memory and the copies for a layout. Raises as `snapshot`."""
        if not self.settle():
            raise NoStagingMemory("a device still copies the state for the save before")
        if self._memory is None or len(self._memory) < layout.size_bytes:
            self.close()  # before more is reserved: both need not fit at once
            grains = -(-layout.size_bytes // _GRAIN_BYTES)
            self._memory = self._source.reserve(grains * _GRAIN_BYTES)
        # `Saver.lay_out` keeps the layout of the same tensors: it is the same object.
        if self._plan is None or self._plan.layout is not layout:
            buffers = halves(memoryview(self._memory)[: layout.size_bytes])
            device = device_of(layout)
            if self._copier is None or self._device != device:
                self._release()
                self._copier = self._choose(device, self._memory, self._beside)
                self._device = device
            made = [self._copier.prepare(copy, layout.changing) for copy in copies(layout, buffers)]
            self._plan = _Plan(layout, made)
        return self._plan

    def hold(self) -> None:
        """Let what is done to the tensors from now on come after the copies."""
        if self._copier is not None:
            self._copier.hold()

    def settle(self) -> bool:
        """Wait until nothing is being copied; False: a device has not ended in time."""
        return self._copier is None or self._copier.settle()

    def forget(self) -> None:
        """Drop the references to the tensors of the last image; its memory stays."""
        self._plan = None

    def close(self) -> None:
        """Free the memory; an image that is still being read stays until the reader is done."""
        self._release()
        self._source.release()
        self._memory = self._plan = None

    def _release(self) -> None:
        copier, self._copier = self._copier, None
        if copier is not None:
            copier.close()


@dataclass(frozen=True, slots=True)
class _Plan:
    """The copies of a layout, kept for the next image of the same layout."""

    layout: FileLayout
    copies: Sequence[Callable[[], Begun]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a save: a rank's write, or what rank 0 does with the files of all ranks."""

    size_bytes: int
    took_s: float
    ended_s: float
    """When it ended, by the monotonic clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a save."""

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
    """The saves of a rank, one at a time, each on a thread that ends with it."""

    def __init__(self) -> None:
        self._thread = threading.Thread()
        self._running: Future[Outcome] | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._running is not None and not self._running.done()

    def start(self, step: int, save: Callable[[OnPart], Place]) -> None:
        """Begin a save; the outcome of the one before must have been taken.

        The thread calls `save` with what is to be called with each part that has ended.
        """
        assert self._running is None, "take the outcome of the save before"
        running: Future[Outcome] = Future()
        # Joined when the interpreter ends: a save in flight is finished first.
        self._thread = threading.Thread(
            target=_run, args=(running, step, save), name="zero-checkpoint", daemon=False
        )
        self._running = running
        try:
            self._thread.start()
        except BaseException:  # also of a signal handler, when the thread may run already
            if running.cancel():
                self._running = None
            raise

    def wait(self, meanwhile: Callable[[], object] = lambda: None) -> Outcome | None:
        """The outcome of the save that was started last, once it has ended; None after that.

        `meanwhile` is called now and then.
        """
        if self._running is None:
            return None
        # No thread is killed: a save ends by the deadlines of its copies and votes, or when their
        # `on_wait` raises.
        while not self._running.done():
            meanwhile()
            with suppress(TimeoutError):
                self._running.result(_MEANWHILE_S)
        outcome = self._running.result()
        self._thread.join()
        self._running = None  # not before: if a signal handler raises, the outcome is not lost
        return outcome

    def finished(self) -> Outcome | None:
        """The outcome as of `wait`, or None at once if the save has not ended."""
        return None if self.busy else self.wait()


def _run(running: Future[Outcome], step: int, save: Callable[[OnPart], Place]) -> None:
    if not running.set_running_or_notify_cancel():
        return
    parts: dict[str, Part] = {}

    def note(part: str, size_bytes: int, took_s: float) -> None:
        parts[part] = Part(size_bytes=size_bytes, took_s=took_s, ended_s=time.monotonic())

    path: Place | None = None
    error: Exception | None = None
    begin_s = time.monotonic()
    try:
        try:
            path = save(note)
        except Exception as failure:
            error = failure
        ended_s = time.monotonic()
        outcome = Outcome(
            step=step,
            write_s=ended_s - begin_s,
            ended_s=ended_s,
            own=parts.get(WRITE),
            whole=parts.get(PUBLISH),
            path=path,
            error=error,
        )
        running.set_result(outcome)
    except BaseException as failure:
        # Without a result, whoever waits for this save would wait for ever.
        running.set_exception(failure)
