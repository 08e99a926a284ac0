"""The tier on a disk: rests in a scratch file, comes into memory in parts, ahead of its use.

Owns the threads and the buffers. Must always hold: what is in memory at any time is the leases
that are open, what is being read ahead, and what is being written; no buffer is used again
before the disk has it; what was read ahead is thrown away when what it was read from changes.

Used through `places.Tier`. Source of the idea: ZeRO-Infinity (arXiv 2104.07857), section 5.2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from zero_engine.tiers.ahead import ReadAhead
from zero_engine.tiers.buffers import Buffers
from zero_engine.tiers.places import Lease, wait
from zero_engine.tiers.scratch import PAGE_BYTES, ScratchFile

_THREADS = 2
"""One reads while the other writes; either keeps a disk busy with requests of megabytes."""


class Nvme:
    """Rests in a file without a name."""

    far = True

    def __init__(self, file: ScratchFile, ahead: ReadAhead, *, pin: bool = False) -> None:
        """A tier on a scratch file.

        Args:
            file: Where to.
            ahead: What `fetch` reads before it is asked for.
            pin: Page-locked buffers, for a GPU's copies.
        """
        self.file = file
        self.buffers = Buffers(pin=pin)
        self._threads = ThreadPoolExecutor(_THREADS, "zero-nvme")
        self._puts: deque[tuple[Future[None], Tensor]] = deque()
        self._ahead = ahead

    # ---- whole tensors ----

    def hold(self, contents: Tensor) -> Tensor:
        """A copy of `contents` in the file."""
        held = self.zeros(contents.numel(), contents.dtype)
        held.copy_(contents)
        self.file.forget_pages()
        return held

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros in the file, of which not a byte is written."""
        return self.file.reserve(numel, dtype)

    def fetch(self, held: Tensor, into: Tensor) -> None:
        """Copy from the file, and begin to read what came after this the last time."""
        buffer = wait(self._ahead.take(held) or self._read(held))
        into.copy_(_typed(buffer, held))
        self.buffers.give(buffer)
        for following in self._ahead.wanted(held):
            self._ahead.add(following, self._read(following))

    def put(self, held: Tensor, values: Tensor) -> None:
        """Begin to write to the file; one write before it may be under way."""
        while len(self._puts) > 1:
            self._end_put()
        buffer = self._filled(held, values)
        self._puts.append(
            (self._threads.submit(self.file.write, held, _pages(buffer, held)), buffer)
        )

    def settle(self) -> None:
        """Wait for what was put, and give back the memory of what was looked at."""
        while self._puts:
            self._end_put()
        self.changed()

    def changed(self) -> None:
        """Throw away what was read ahead, and give back the memory of what was looked at."""
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
        """Read each row that lies in the file into a buffer; the others are in memory already."""
        in_file = [name for name, held in rows.items() if self.file.holds(held)]
        buffers = {name: self.buffers.take(_size(rows[name])) for name in in_file}
        return self._threads.submit(self._open, dict(rows), buffers)

    def _open(self, rows: dict[str, Tensor], buffers: dict[str, Tensor]) -> Lease:
        for name, buffer in buffers.items():
            self._fill(rows[name], buffer)
        return Lease(rows | {n: _typed(b, rows[n]) for n, b in buffers.items()}, buffers)

    def close(self, rows: Mapping[str, Tensor], lease: Lease) -> Future[None]:
        """Write each row that lies in the file."""
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
    """Bytes of the whole pages that a tensor lies in, which it begins."""
    return -(-held.nbytes // PAGE_BYTES) * PAGE_BYTES


def _pages(buffer: Tensor, held: Tensor) -> Tensor:
    return buffer[: _size(held)]


def _typed(buffer: Tensor, held: Tensor) -> Tensor:
    """The part of a buffer that stands for a tensor, in its dtype."""
    return buffer[: held.nbytes].view(held.dtype)
