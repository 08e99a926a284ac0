"""Prefetching: ranges of files are read past the page cache, several at a time, into huge pages.

The ranges of a file that a rank wants have gaps, which hold what other ranks want. The kernel's own
read-ahead falters at each gap or reads what is in it, and allocates a page of memory for every 4
KiB that are read once. The ranges are known beforehand: they are fetched straight into a few
chunks, while earlier ranges are taken out of other chunks. A range that is not fetched, for
whatever reason, is left to the reader, which reads it plainly and receives the error.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zero_checkpoint.files.chunks import has_huge_pages, zeros
from zero_checkpoint.files.source import Span
from zero_checkpoint.format.layout import PAGE_BYTES
from zero_checkpoint.format.plan import READ_BYTES

LEAST_BYTES = 256 << 10
"""Shorter ranges go through the page cache: a chunk for each would do little else than wait."""
_HINTS = 64
"""Short ranges that the kernel is advised of between two fetches: 16 MiB at most."""
_AT_ONCE = 3
"""Concurrent fetches: the disk always has a next request."""
_CHUNKS = _AT_ONCE + 1


class _File(NamedTuple):
    path: Path
    descriptor: int | None
    """None: the file cannot be read past the page cache."""


class _Fetch(NamedTuple):
    file: _File
    span: Span
    chunk: memoryview
    got: Future[int]


class Fetches:
    """The fetches in flight, of one file after the other; for use by one thread."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_AT_ONCE, "zero-read")
        self._free: list[memoryview] = []
        self._later: Iterator[tuple[Path, Span]] = iter(())
        self._coming: deque[_Fetch] = deque()
        self._files: deque[_File] = deque()
        """The open files: the last one is that of the last fetch."""
        self._hints_left = _HINTS

    def expect(self, spans: Iterable[tuple[Path, Span]]) -> None:
        """Fetch these ranges, in this order, as far as it pays; call it once for all reads."""
        # With small pages it can be half as fast as through the page cache: each page is one more
        # segment to the disk.
        if has_huge_pages():
            with suppress(OSError):  # no memory for chunks: then all is read plainly
                memory = memoryview(zeros(_CHUNKS * READ_BYTES))
                begins = range(0, len(memory), READ_BYTES)
                self._free = [memory[at : at + READ_BYTES] for at in begins]
        self._later = iter(spans)
        self._fetch_more()

    def _fetch_more(self) -> None:
        """Begin fetches until no chunk is free."""
        while self._free and (wanted := next(self._later, None)):
            path, span = wanted
            offset, length = span
            # It may begin while fetches of the file before are taken: both are open.
            if not self._files or self._files[-1].path != path:
                # No fetch of the last file is in flight: nobody needs its descriptor any more.
                if self._files and not any(each.file is self._files[-1] for each in self._coming):
                    _close(self._files.pop())
                flags = os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NONBLOCK  # it may be a pipe
                try:
                    self._files.append(_File(path, os.open(path, flags)))
                except OSError:  # the reader meets the cause, such as a missing file, in its turn
                    self._files.append(_File(path, None))
            file = self._files[-1]
            if file.descriptor is None:
                continue
            # Announced only: it is in the page cache when it is read.
            if length < LEAST_BYTES and self._hints_left:
                self._hints_left -= 1
                with suppress(OSError):  # it is no file
                    os.posix_fadvise(file.descriptor, offset, length, os.POSIX_FADV_WILLNEED)
            elif LEAST_BYTES <= length <= READ_BYTES and not is_cached(file.descriptor, offset):
                # A range that is in the page cache is faster from there.
                chunk = self._free.pop()
                got = self._threads.submit(_read, file.descriptor, span, chunk)
                self._coming.append(_Fetch(file, span, chunk, got))

    def take(self, path: Path, buffers: Sequence[memoryview], offset: int) -> bool:
        """Scatter the bytes from `offset` on into the buffers, unless they were not fetched."""
        span = (offset, sum(map(len, buffers)))
        if not self._coming or (self._coming[0].file.path, self._coming[0].span) != (path, span):
            return False
        fetch = self._coming.popleft()
        while self._files[0] is not fetch.file:
            _close(self._files.popleft())  # no fetch of this file is in flight any more
        # Whatever went wrong: the reader reads it again, and meets the error in its turn.
        try:
            whole = fetch.got.result() >= span[1]
        except OSError:
            whole = False
        if whole:
            left = np.frombuffer(fetch.chunk, np.uint8)
            for buffer in buffers:  # by NumPy, which releases the interpreter's lock meanwhile
                np.frombuffer(buffer, np.uint8)[:] = left[: len(buffer)]
                left = left[len(buffer) :]
        self._free.append(fetch.chunk)
        self._hints_left = _HINTS
        self._fetch_more()
        return whole

    def close(self) -> None:
        """Cancel the fetches that have not begun, and close the files."""
        self._threads.shutdown(cancel_futures=True)
        while self._files:
            _close(self._files.pop())


def _close(file: _File) -> None:
    if file.descriptor is not None:
        os.close(file.descriptor)


def _read(descriptor: int, span: Span, chunk: memoryview) -> int:
    pages = -(-span[1] // PAGE_BYTES)
    return os.preadv(descriptor, [chunk[: pages * PAGE_BYTES]], span[0])


_mincore = ctypes.CDLL(None).mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


def is_cached(descriptor: int, offset: int) -> bool:
    """Whether the page at an offset is in the page cache; always True for another user's file."""
    begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
    try:
        page = mmap.mmap(descriptor, 1, prot=mmap.PROT_READ, offset=begin)
    except (OSError, ValueError):  # it cannot be mapped, or the file ends before
        return False
    with page:
        address, answer = np.frombuffer(page, np.uint8).ctypes.data, ctypes.create_string_buffer(1)
        return _mincore(address, 1, answer) == 0 and bool(answer.raw[0] & 1)
