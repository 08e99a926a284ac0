"""Reading ranges of files past the page cache, several at a time, where there are huge pages.

What a rank wants of a file has gaps, in which lies what other ranks want. The kernel's own
read-ahead falters at each gap or reads what is in it, and finds a page of memory for every 4 KiB
that are read once. What is expected is known: it is fetched straight into a few chunks of huge
pages, while what came before is taken out of others. With small pages that can be half as fast as
through the page cache: each of them is a segment of its own to the disk.

Must always hold: nothing is fetched but what was expected, up to whole pages; it takes the memory
of the chunks, however much is expected; what is not fetched, for whatever reason, is left to the
reader, who reads it plainly and hears of the error. Of short ranges the kernel is told, so that
they are in the page cache by then.

Called by `reader`, for all that it will read, and by `local_file`, for one file.
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

from zero_checkpoint.files.huge_pages import are_given, zeros
from zero_checkpoint.files.source import Span
from zero_checkpoint.format.layout import PAGE_BYTES
from zero_checkpoint.format.plan import READ_BYTES

LEAST_BYTES = 256 << 10
"""Shorter ranges go through the page cache: a chunk for each would do little else than wait."""
_HINTS = 64
"""How many of those the kernel is told of between two fetches: of 16 MiB at most."""
_AT_ONCE = 3
"""The disk has a next request, also while an answer to an earlier one is taken away."""
_CHUNKS = _AT_ONCE + 1


class _File(NamedTuple):
    path: Path
    descriptor: int | None
    """None: it cannot be read past the page cache."""


class _Fetch(NamedTuple):
    file: _File
    span: Span
    chunk: memoryview
    got: Future[int]


class Fetches:
    """The ranges that are under way, of one file or of one after the other; for one thread.

    What follows in the next file is fetched while the end of this one is taken.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_AT_ONCE, "zero-read")
        self._free: list[memoryview] = []
        self._later: Iterator[tuple[Path, Span]] = iter(())
        self._coming: deque[_Fetch] = deque()
        self._files: deque[_File] = deque()
        """Those that are open: the last one is that of the last fetch."""
        self._hints_left = _HINTS

    def expect(self, spans: Iterable[tuple[Path, Span]]) -> None:
        """Fetch of these what is worth it, in this order; once for all that will be read."""
        if are_given():
            with suppress(OSError):  # no memory for chunks: then all is read plainly
                self._free = _chunks()
        self._later = iter(spans)
        self._go_on()

    def _go_on(self) -> None:
        while self._free and (wanted := next(self._later, None)):
            path, span = wanted
            file = self._opened(path)
            if file.descriptor is None:
                continue
            if span[1] < LEAST_BYTES and self._hints_left:
                self._hints_left -= 1
                _hint(file.descriptor, span)
            elif _is_worth_it(file.descriptor, span):
                chunk = self._free.pop()
                got = self._threads.submit(_read, file.descriptor, span, chunk)
                self._coming.append(_Fetch(file, span, chunk, got))

    def _opened(self, path: Path) -> _File:
        if not self._files or self._files[-1].path != path:
            if self._files and not any(fetch.file is self._files[-1] for fetch in self._coming):
                _close(self._files.pop())
            self._files.append(_open(path))
        return self._files[-1]

    def take(self, path: Path, buffers: Sequence[memoryview], offset: int) -> bool:
        """Scatter the bytes from `offset` on into the buffers, unless they were not fetched."""
        span = (offset, sum(map(len, buffers)))
        if not self._coming or (self._coming[0].file.path, self._coming[0].span) != (path, span):
            return False
        fetch = self._coming.popleft()
        while self._files[0] is not fetch.file:
            _close(self._files.popleft())  # of which nothing is under way any more
        try:
            whole = fetch.got.result() >= span[1]
        except OSError:
            whole = False
        if whole:
            _scatter(fetch.chunk, buffers)
        self._free.append(fetch.chunk)
        self._hints_left = _HINTS
        self._go_on()
        return whole

    def close(self) -> None:
        """Give up what is under way."""
        self._threads.shutdown(cancel_futures=True)
        while self._files:
            _close(self._files.pop())


def _chunks() -> list[memoryview]:
    memory = memoryview(zeros(_CHUNKS * READ_BYTES))
    return [memory[at : at + READ_BYTES] for at in range(0, len(memory), READ_BYTES)]


def _open(path: Path) -> _File:
    flags = os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NONBLOCK  # it may be a pipe
    try:
        return _File(path, os.open(path, flags))
    except OSError:  # that it is not there, say, is found out again in its turn
        return _File(path, None)


def _close(file: _File) -> None:
    if file.descriptor is not None:
        os.close(file.descriptor)


def _hint(descriptor: int, span: Span) -> None:
    with suppress(OSError):  # it is no file
        os.posix_fadvise(descriptor, *span, os.POSIX_FADV_WILLNEED)


def _read(descriptor: int, span: Span, chunk: memoryview) -> int:
    pages = -(-span[1] // PAGE_BYTES)
    return os.preadv(descriptor, [chunk[: pages * PAGE_BYTES]], span[0])


def _is_worth_it(descriptor: int, span: Span) -> bool:
    """What is in the page cache is faster from there."""
    return LEAST_BYTES <= span[1] <= READ_BYTES and not is_cached(descriptor, span[0])


def _scatter(data: memoryview, buffers: Sequence[memoryview]) -> None:
    left = np.frombuffer(data, np.uint8)
    for buffer in buffers:  # by numpy, because it lets the threads run meanwhile
        np.frombuffer(buffer, np.uint8)[:] = left[: len(buffer)]
        left = left[len(buffer) :]


_mincore = ctypes.CDLL(None).mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


def is_cached(descriptor: int, offset: int) -> bool:
    """Whether the page at an offset is in memory; of a file of others, the kernel says yes."""
    begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
    try:
        page = mmap.mmap(descriptor, 1, prot=mmap.PROT_READ, offset=begin)
    except (OSError, ValueError):  # it cannot be mapped, or the file ends before
        return False
    with page:
        address, answer = np.frombuffer(page, np.uint8).ctypes.data, ctypes.create_string_buffer(1)
        return _mincore(address, 1, answer) == 0 and bool(answer.raw[0] & 1)
