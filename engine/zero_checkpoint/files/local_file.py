"""A file of this machine as a `Source`; a failed read is tried again before its error is raised.

A disk that has lost a sector returns EIO for good. A network file system returns EIO, ESTALE or
ETIMEDOUT while its server fails over or admits a client again, and works a second later. Only an
error that stays is evidence against a checkpoint.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import tenacity

from zero_checkpoint.files.fetches import Fetches
from zero_checkpoint.files.source import Source, Span
from zero_checkpoint.format.layout import PAGE_BYTES

_log = logging.getLogger(__name__)

_IOV_MAX = 1024
"""Buffers that one preadv takes (Linux UIO_MAXIOV)."""
NOT_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
"""Errors of a file system without direct I/O, when a file is opened or first when it is read."""
MAY_PASS = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT})
"""Errors that a file system also returns for a condition that is over soon."""
TRIES = 5


@contextmanager
def open_file(path: Path, ahead: Fetches | None = None) -> Iterator[Source]:
    """Open a file to read ranges of it; raises OSError, like every operation on it.

    `ahead` expects the ranges of this file, and of others, already.
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
    """Open a file anew, for what the device holds: the page cache may hold something else."""
    try:
        descriptor = _descriptor(path, os.O_DIRECT)
    except OSError as error:
        if error.errno not in NOT_DIRECT:
            raise
        # A file system without direct I/O: `read_into` asks the kernel to drop what is cached.
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
        while count := self._read(pages[end - begin :], end):
            end += count
            if end % PAGE_BYTES or end == begin + size:  # the end of the file, or of the range
                break
        at = offset - begin
        for buffer in buffers:
            part = pages[at : min(at + len(buffer), end - begin)]
            buffer[: len(part)] = part
            at += len(buffer)
        return max(0, offset + total - max(end, offset))

    def _read(self, pages: memoryview, offset: int) -> int:
        try:
            return os.preadv(self.descriptor, [pages], offset)
        except OSError as error:
            flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
            if error.errno not in NOT_DIRECT or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            return os.preadv(self.descriptor, [pages], offset)


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
        left = [buffer for buffer in buffers if buffer]  # an empty one would look like the end
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
        """Read through a new descriptor."""
        # A descriptor that a server has forgotten stays stale, however often it is asked.
        descriptor = _descriptor(self.path)
        try:
            return os.preadv(descriptor, buffers, offset)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        finally:
            os.close(descriptor)


# ---- retries ----


def may_pass(error: BaseException) -> bool:
    """Whether a retry may succeed."""
    return isinstance(error, OSError) and error.errno in MAY_PASS


def _log_retry(state: tenacity.RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    _log.warning("reading again, try %d of %d: %s", state.attempt_number + 1, TRIES, error)


patiently = tenacity.Retrying(
    retry=tenacity.retry_if_exception(may_pass),
    stop=tenacity.stop_after_attempt(TRIES),
    # Random, so that a thousand ranks do not return to their server at the same time.
    wait=tenacity.wait_exponential(multiplier=0.05) + tenacity.wait_random(0, 0.05),
    before_sleep=_log_retry,
    reraise=True,
)
"""`patiently(read, ...)` calls `read` until it succeeds; raises the error of the last try."""
