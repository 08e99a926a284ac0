"""A file of this machine as a `Source`.

Must always hold: a read that fails is retried before the error is raised.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from zero_checkpoint.files.fetches import Fetches
from zero_checkpoint.files.read_retry import may_pass, patiently
from zero_checkpoint.files.source import Source, Span
from zero_checkpoint.format.layout import PAGE_BYTES

_IOV_MAX = 1024
"""Buffers that one preadv takes (Linux UIO_MAXIOV)."""


@contextmanager
def open_file(path: Path, ahead: Fetches | None = None) -> Iterator[Source]:
    """Open a file to read ranges of it; raises OSError, like every operation on it.

    Args:
        path: The file.
        ahead: Fetches that expect the ranges of this file, and of others, already.
    """
    with ExitStack() as opened:
        descriptor = patiently(_descriptor, path)
        opened.callback(os.close, descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, "not a regular file", str(path))
        fetches = ahead or opened.enter_context(closing(Fetches()))
        yield _File(path, descriptor, fetches, is_expected=ahead is not None)


@contextmanager
def open_past_cache(path: Path) -> Iterator[Source]:
    """Open a file anew, for what the device holds: the page cache may hold something else.

    On a file system without direct I/O, the kernel is asked to drop what it has cached.
    """
    try:
        descriptor = _descriptor(path, os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        descriptor = _descriptor(path)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, "not a regular file", str(path))
        yield _PastCache(descriptor)
    finally:
        os.close(descriptor)


def _descriptor(path: Path, flags: int = 0) -> int:
    # Without blocking: a pipe in the place of a file may never get a writer.
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)


@dataclass(slots=True)
class _PastCache:
    """A file of this machine, read in whole pages into memory of its own."""

    descriptor: int

    def expect(self, spans: Sequence[Span]) -> None:
        """Nothing: these reads are rare."""

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        total = sum(map(len, buffers))
        begin = offset // PAGE_BYTES * PAGE_BYTES
        size = -(-(offset + total - begin) // PAGE_BYTES) * PAGE_BYTES
        os.posix_fadvise(self.descriptor, begin, size, os.POSIX_FADV_DONTNEED)
        pages = memoryview(mmap.mmap(-1, size))  # aligned, as direct I/O asks
        end = begin
        while count := os.preadv(self.descriptor, [pages[end - begin :]], end):
            end += count
            if end % PAGE_BYTES or end == begin + size:  # the end of the file, or of the range
                break
        at = offset - begin
        for buffer in buffers:
            part = pages[at : min(at + len(buffer), end - begin)]
            buffer[: len(part)] = part
            at += len(buffer)
        return max(0, offset + total - max(end, offset))


@dataclass(slots=True)
class _File:
    """A file of this machine: ranges that were not fetched are read straight into the buffers."""

    path: Path
    descriptor: int
    fetches: Fetches
    is_expected: bool
    is_hopeless: bool = False
    """All retries of a read have failed: no further range of this file is retried."""

    def expect(self, spans: Sequence[Span]) -> None:
        if not self.is_expected:
            self.fetches.expect((self.path, span) for span in spans)

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        left = [buffer for buffer in buffers if buffer]
        if self.fetches.take(self.path, left, offset):
            return 0
        missing = sum(map(len, left))
        while left:
            count = self._read(left[:_IOV_MAX], offset)
            if count == 0:
                break
            offset, missing = offset + count, missing - count
            full = 0
            while full < len(left) and len(left[full]) <= count:
                count -= len(left[full])
                full += 1
            left = left[full:]
            if count:
                left[0] = left[0][count:]
        return missing

    def _read(self, buffers: list[memoryview], offset: int) -> int:
        try:
            return os.preadv(self.descriptor, buffers, offset)
        except OSError as error:
            if self.is_hopeless or not may_pass(error):
                raise
        try:
            return patiently(self._read_anew, buffers, offset)
        except OSError:
            self.is_hopeless = True
            raise

    def _read_anew(self, buffers: list[memoryview], offset: int) -> int:
        """Read through a new descriptor: a descriptor that a server has forgotten stays stale."""
        descriptor = _descriptor(self.path)
        try:
            return os.preadv(descriptor, buffers, offset)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        finally:
            os.close(descriptor)
