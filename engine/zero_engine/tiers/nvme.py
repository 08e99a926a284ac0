"""The tier on a disk: rests in a scratch file, comes into memory in parts, ahead of its use.

Owns the threads, the buffers and the order of the reads ahead. Memory holds the open leases, the
reads ahead and the writes under way, and nothing else.

Source of the idea: ZeRO-Infinity (arXiv 2104.07857), section 5.2. DeepSpeed records a trace of the
whole pass and drops it when one module runs in another order; here each tensor has its successor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

import torch
from torch import Tensor

from zero_engine.tiers.places import Lease, wait
from zero_engine.tiers.scratch import PAGE_BYTES, ScratchFile, aligned

_THREADS = 2
"""One reads while the other writes; either keeps a disk busy with requests of megabytes."""


class ReadAhead:
    """The reads ahead, by the tensor that they read: at most `reads`, and at most `room_bytes`."""

    def __init__(self, reads: int = 4, room_bytes: int = 1600 << 20) -> None:
        self._reads = reads
        self._room_bytes = room_bytes
        self._next: dict[int, Tensor] = {}
        self._last: Tensor | None = None
        self._started: dict[int, tuple[Tensor, Future[Tensor]]] = {}

    def take(self, held: Tensor) -> Future[Tensor] | None:
        """The read of the tensor that is needed now, if it was begun ahead."""
        # A model's modules run in the same order step after step. A wrong guess costs a read.
        if self._last is not None:
            self._next[self._last.data_ptr()] = held
        self._last = held
        _, future = self._started.pop(held.data_ptr(), (held, None))
        return future

    def wanted(self, held: Tensor) -> list[Tensor]:
        """The tensors to begin to read: the successors of `held`, in order, within the bounds."""
        found: list[Tensor] = []
        room = self._room_bytes - sum(each.nbytes for each, _ in self._started.values())
        following = self._next.get(held.data_ptr())
        seen = {held.data_ptr()}
        while following is not None and following.data_ptr() not in seen:
            seen.add(following.data_ptr())
            if following.data_ptr() not in self._started:
                room -= following.nbytes
                if room < 0 or len(self._started) + len(found) >= self._reads:
                    break
                found.append(following)
            following = self._next.get(following.data_ptr())
        return found

    def add(self, held: Tensor, future: Future[Tensor]) -> None:
        """Note a read that has begun."""
        self._started[held.data_ptr()] = (held, future)

    def clear(self) -> list[Future[Tensor]]:
        """Remove all reads under way, and return them; keep the learnt order."""
        futures = [future for _, future in self._started.values()]
        self._started.clear()
        return futures


class Buffers:
    """A pool of aligned buffers, for any thread; `size_bytes` counts idle buffers, too."""

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._lock = Lock()
        self._idle: list[Tensor] = []
        self.size_bytes = 0
        self.peak_bytes = 0

    def take(self, size_bytes: int) -> Tensor:
        """A buffer of undefined bytes, of this size or larger."""
        with self._lock:
            fitting = [b for b in self._idle if b.numel() >= size_bytes]
            chosen = min(fitting or self._idle, key=Tensor.numel, default=None)
            if chosen is not None:
                self._idle = [b for b in self._idle if b is not chosen]
            if fitting and chosen is not None:
                return chosen
            # One that is too small makes room for the new one: there are never more buffers than
            # were in use at one time, however many sizes there are.
            self.size_bytes -= chosen.numel() if chosen is not None else 0
            del chosen
            buffer = aligned(size_bytes, pin=self._pin)
            self.size_bytes += buffer.numel()
            self.peak_bytes = max(self.peak_bytes, self.size_bytes)
            return buffer

    def give(self, buffer: Tensor) -> None:
        """Return a buffer to the pool."""
        with self._lock:
            self._idle.append(buffer)


class Nvme:
    """The tier whose tensors rest in a scratch file."""

    far = True

    def __init__(
        self, file: ScratchFile, ahead: ReadAhead | None = None, *, pin: bool = False
    ) -> None:
        """A tier on a scratch file; `pin`: page-locked buffers, for copies to and from a GPU."""
        self.file = file
        self.buffers = Buffers(pin=pin)
        self._threads = ThreadPoolExecutor(_THREADS, "zero-nvme")
        self._puts: deque[tuple[Future[None], Tensor]] = deque()
        self._ahead = ahead or ReadAhead()

    # ---- whole tensors ----

    def hold(self, contents: Tensor) -> Tensor:
        """A copy of `contents` in the file."""
        held = self.zeros(contents.numel(), contents.dtype)
        # By way of the mapping, whose pages are in memory until they are forgotten.
        held.copy_(contents)
        self.file.forget_pages()
        return held

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros in the file: the space is allocated, and nothing is written."""
        return self.file.reserve(numel, dtype)

    def fetch(self, held: Tensor, into: Tensor) -> None:
        """Copy from the file, and begin to read the successors of this tensor."""
        buffer = wait(self._ahead.take(held) or self._read(held))
        # Not in the background: the buffer is used again as soon as it is given back.
        into.copy_(_typed(buffer, held))
        self.buffers.give(buffer)
        for following in self._ahead.wanted(held):
            self._ahead.add(following, self._read(following))

    def put(self, held: Tensor, values: Tensor) -> None:
        """Begin to write to the file; one earlier write may be under way."""
        # With this one two are under way at most: `observe.memory` counts their buffers.
        while len(self._puts) > 1:
            self._end_put()
        buffer = self._filled(held, values)
        self._puts.append(
            (self._threads.submit(self.file.write, held, _pages(buffer, held)), buffer)
        )

    def settle(self) -> None:
        """Wait for all writes, and free the pages of the file that are in memory."""
        while self._puts:
            self._end_put()
        # What was read ahead of a write is what was there before it.
        self.changed()

    def changed(self) -> None:
        """Discard the reads ahead, and free the pages of the file that are in memory."""
        for future in self._ahead.clear():
            self.buffers.give(wait(future))
        self.file.forget_pages()

    def _end_put(self) -> None:
        future, buffer = self._puts.popleft()
        wait(future)
        self.buffers.give(buffer)

    def _read(self, held: Tensor) -> Future[Tensor]:
        return self._threads.submit(self._fill, held, self.buffers.take(_size(held)))

    def _fill(self, held: Tensor, buffer: Tensor) -> Tensor:
        self.file.read(held, _pages(buffer, held))
        return buffer

    def _filled(self, held: Tensor, values: Tensor) -> Tensor:
        buffer = self.buffers.take(_size(held))
        _typed(buffer, held).copy_(values)
        return buffer

    # ---- sub-groups ----

    def open(self, rows: Mapping[str, Tensor]) -> Future[Lease]:
        """Read each row in the file into a buffer; the other rows are in memory already."""
        in_file = [name for name, held in rows.items() if self.file.holds(held)]
        buffers = {name: self.buffers.take(_size(rows[name])) for name in in_file}
        return self._threads.submit(self._open, dict(rows), buffers)

    def _open(self, rows: dict[str, Tensor], buffers: dict[str, Tensor]) -> Lease:
        for name, buffer in buffers.items():
            self._fill(rows[name], buffer)
        return Lease(rows | {n: _typed(b, rows[n]) for n, b in buffers.items()}, buffers)

    def close(self, rows: Mapping[str, Tensor], lease: Lease) -> Future[None]:
        """Write each row in the file."""
        # State that the first step has made is in no buffer of the lease.
        made = {
            name: self._filled(held, lease.rows[name])
            for name, held in rows.items()
            if name not in lease.buffers and self.file.holds(held)
        }
        return self._threads.submit(self._close, dict(rows), lease.buffers | made)

    def _close(self, rows: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        for name, buffer in buffers.items():
            self.file.write(rows[name], _pages(buffer, rows[name]))
            self.buffers.give(buffer)


def _size(held: Tensor) -> int:
    """The bytes of the whole pages of a tensor, which begins on a page."""
    return -(-held.nbytes // PAGE_BYTES) * PAGE_BYTES


def _pages(buffer: Tensor, held: Tensor) -> Tensor:
    return buffer[: _size(held)]


def _typed(buffer: Tensor, held: Tensor) -> Tensor:
    """The part of a buffer that has the bytes of a tensor, in its dtype."""
    return buffer[: held.nbytes].view(held.dtype)
