"""A file of this machine as a `Source`.

Must always hold: a read that fails is retried before the error is raised.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from zero_checkpoint.files.fetches import Fetches
from zero_checkpoint.files.read_retry import may_pass, patiently
from zero_checkpoint.files.source import Source, Span

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


def _descriptor(path: Path) -> int:
    # Without blocking: a pipe in the place of a file may never get a writer.
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)


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
