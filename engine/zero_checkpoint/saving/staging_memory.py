"""Where a staging buffer's memory comes from: this process alone, or a file others can link to.

A save to disk needs it only while its process lives: `PrivateStaging` is plain memory in huge
pages, the fastest to copy into and to write from, and limited by the machine's memory, not by the
size of /dev/shm. A checkpoint in memory outlives its process: `SharedStaging` is a file in a tmpfs.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import secrets
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from zero_checkpoint.files.chunks import zeros
from zero_contract.kernel import available_bytes
from zero_contract.owned_dir import lock

_log = logging.getLogger(__name__)

_PREFIX = "zero-staging."


class NoStagingMemory(Exception):
    """There is too little memory; the message says how much, where, and the remedy."""


class StagingMemory(Protocol):
    """Allocates one piece of memory at a time."""

    @property
    def path(self) -> Path | None:
        """The file of the memory, if it has one."""

    def reserve(self, size_bytes: int) -> mmap.mmap:
        """Allocate memory, after freeing the piece before. Raises NoStagingMemory."""

    def release(self) -> None:
        """Free the memory; pages that are still mapped stay until they are unmapped."""


class PrivateStaging:
    """Memory of this process."""

    path = None

    def reserve(self, size_bytes: int) -> mmap.mmap:
        """Allocate memory; the kernel allocates each page when it is written to."""
        free = available_bytes()
        if free < size_bytes:
            raise NoStagingMemory(
                f"this machine has {free >> 20} MiB of memory left, the state takes "
                f"{size_bytes >> 20} MiB; give it, or the container that this is in, more"
            )
        try:
            return zeros(size_bytes)
        except OSError as error:  # a limit of this process (ulimit -v), or strict overcommit
            raise NoStagingMemory(
                f"no memory for a copy of the state, {size_bytes >> 20} MiB: {error.strerror}"
            ) from error

    def release(self) -> None:
        """Do nothing: the memory is freed when it is unmapped."""


class SharedStaging:
    """A file in a tmpfs."""

    def __init__(self, job: str, rank: int, directory: Path) -> None:
        """No memory is allocated yet."""
        # For people, who look into the tmpfs.
        self._name = f"{_PREFIX}{re.sub(r'[^0-9A-Za-z_-]', '-', job)[:64]}.r{rank:05d}"
        self._directory = directory
        self.path: Path | None = None
        self._remove: Callable[[], object] = lambda: None

    def reserve(self, size_bytes: int) -> mmap.mmap:
        """Allocate memory with all its pages: a full tmpfs is an error now, and no SIGBUS later.

        Raises:
            NoStagingMemory: The tmpfs or the machine has too little memory.
        """
        self.release()
        try:
            system = os.statvfs(self._directory)
        except OSError:  # the directory is not there: as if it had no room
            free = 0
        else:
            # A tmpfs may be larger than the memory, and the kernel then kills processes.
            free = min(system.f_bavail * system.f_frsize, available_bytes())
        if free < size_bytes:
            raise NoStagingMemory(
                f"{self._directory} has room for {max(free, 0) >> 20} MiB, the state takes "
                f"{size_bytes >> 20} MiB; enlarge it (mount -o remount,size=..., docker "
                "--shm-size, an emptyDir with medium: Memory)"
            )
        try:
            while True:
                path = self._directory / f"{self._name}.{secrets.token_hex(4)}"
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                descriptor = os.open(path, flags, 0o600)
                if lock(descriptor) and os.fstat(descriptor).st_nlink:
                    break
                os.close(descriptor)  # a sweep has removed the file before it was locked
        except OSError as error:
            raise NoStagingMemory(
                f"no memory for a copy of the state in {self._directory}: {error.strerror}"
            ) from error
        self.path = path
        self._remove = weakref.finalize(self, _remove, path, descriptor, os.getpid())
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
            return mmap.mmap(descriptor, size_bytes)
        except OSError as error:
            self.release()
            raise NoStagingMemory(f"{path}: {size_bytes >> 20} MiB: {error.strerror}") from error

    def release(self) -> None:
        """Remove the file; its other links, and what is mapped, stay."""
        self._remove()


def sweep(directory: Path) -> None:
    """Remove the staging buffers of processes that are dead; never raises."""
    with suppress(OSError):
        for path in directory.glob(f"{_PREFIX}*"):
            with suppress(OSError):  # gone meanwhile, or another user's
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    # The kernel drops the lock with its process, whatever ends it, of any job and
                    # any pid namespace.
                    if lock(descriptor):
                        path.unlink()
                        _log.info("removed %s, left by a process that died", path)
                finally:
                    os.close(descriptor)


def _remove(path: Path, descriptor: int, owner: int) -> None:
    """Unlink and unlock."""
    # Only in the process that made the file: its children inherit this.
    if os.getpid() == owner:
        path.unlink(missing_ok=True)
        os.close(descriptor)
