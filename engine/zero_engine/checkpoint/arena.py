"""Memory that a save is copied into, so that training goes on while it is written.

An arena is a file in /dev/shm, mapped, and reused from save to save; a frozen image in it is byte
for byte the file that goes to disk. Its pages are reserved before anything is copied: a file
system that is too small shows as an error then, not as a SIGBUS later.

Must always hold: an arena file is locked for as long as its process lives. The kernel drops the
lock with the process, whatever ends it, so `sweep` removes exactly what the dead have left, of
any job and in any pid namespace.

Called by `persistence`, on every rank.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import re
import secrets
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zero_engine.checkpoint.layout import FileLayout, parts

_log = logging.getLogger(__name__)

DIRECTORY = Path("/dev/shm")
_PREFIX = "zero-arena."
_GRAIN_BYTES = 1 << 20
"""Capacities are multiples of it: a step count that grows by a digit needs no new arena."""
_SLAB_BYTES = 16 << 20


class NoArena(Exception):
    """There is not enough shared memory; the message says how much, where, and the remedy."""


@dataclass(frozen=True, slots=True)
class FrozenImage:
    """A copy of the state as of one moment, see `writer.Image`."""

    layout: FileLayout
    memory: mmap.mmap
    """Begins with the image; may be longer."""
    path: Path
    """The file of this memory, for as long as the arena is not closed."""

    def slabs(self) -> Iterator[memoryview]:
        """Parts of 16 MiB, each beginning on a page, as direct writing wants it."""
        whole = memoryview(self.memory)[: self.layout.size_bytes]
        for begin in range(0, len(whole), _SLAB_BYTES):
            yield whole[begin : begin + _SLAB_BYTES]


class Arena:
    """The arena of one rank. One image at a time: the next `freeze` overwrites it."""

    def __init__(self, job: str, rank: int, directory: Path = DIRECTORY) -> None:
        """Nothing is reserved before the first `freeze`.

        Args:
            job: With `rank`, what the file is called: people see whose memory it is.
            rank: Of this worker.
            directory: A tmpfs.
        """
        self._name = f"{_PREFIX}{re.sub(r'[^0-9A-Za-z_-]', '-', job)[:64]}.r{rank:05d}"
        self._directory = directory
        self._path = directory
        self._memory: mmap.mmap | None = None
        self._bytes: Tensor | None = None
        self._copy: _Copy | None = None
        self._remove: Callable[[], object] = lambda: None

    def freeze(self, layout: FileLayout) -> FrozenImage:
        """Copy what is placed in a layout; when this returns, the tensors may change.

        Raises:
            NoArena: There is no room.
        """
        if self._memory is None or len(self._memory) < layout.size_bytes:
            self._reserve(layout.size_bytes)
        assert self._memory is not None
        assert self._bytes is not None
        if self._copy is None or self._copy.layout is not layout:
            self._copy = _plan(layout, self._bytes)
        torch._foreach_copy_(self._copy.targets, self._copy.sources)  # tensors may be many
        return FrozenImage(layout, self._memory, self._path)

    def forget(self) -> None:
        """Let go of the tensors of the last image, but not of its memory."""
        self._copy = None

    def close(self) -> None:
        """Give the memory back; an image that is still being read stays until it is not."""
        self._remove()
        self._memory = self._bytes = self._copy = None

    def _reserve(self, size_bytes: int) -> None:
        self.close()
        capacity = -(-size_bytes // _GRAIN_BYTES) * _GRAIN_BYTES
        self._check_room(capacity)
        try:
            path, descriptor = self._create()
        except OSError as error:
            raise NoArena(f"no arena in {self._directory}: {error.strerror}") from error
        self._path = path
        self._remove = weakref.finalize(self, _remove, path, descriptor, os.getpid())
        try:
            os.posix_fallocate(descriptor, 0, capacity)
            self._memory = mmap.mmap(descriptor, capacity)
        except OSError as error:
            self.close()
            raise NoArena(f"{path}: {capacity >> 20} MiB: {error.strerror}") from error
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def _check_room(self, capacity: int) -> None:
        """A tmpfs may promise more than there is memory, and the kernel then kills processes."""
        free = _free_bytes(self._directory)
        if free < capacity:
            raise NoArena(
                f"{self._directory} has room for {max(free, 0) >> 20} MiB, the state takes "
                f"{capacity >> 20} MiB; enlarge it (mount -o remount,size=..., docker --shm-size, "
                "an emptyDir with medium: Memory)"
            )

    def _create(self) -> tuple[Path, int]:
        """A new file and its descriptor, locked."""
        while True:
            path = self._directory / f"{self._name}.{secrets.token_hex(4)}"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:  # else a sweep came between the two calls
                return path, descriptor
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class _Copy:
    """What to copy where, kept for the next image of the same layout."""

    layout: FileLayout
    targets: tuple[Tensor, ...]
    sources: list[Tensor]


def _plan(layout: FileLayout, memory: Tensor) -> _Copy:
    sources = list(parts(layout))
    targets = memory[: layout.size_bytes].split([part.numel() for part in sources])
    return _Copy(layout, targets, sources)


def sweep(directory: Path = DIRECTORY) -> None:
    """Remove the arenas of processes that are dead; never raises."""
    with suppress(OSError):
        for path in directory.glob(f"{_PREFIX}*"):
            _remove_if_dead(path)


def _remove_if_dead(path: Path) -> None:
    with suppress(OSError):  # gone meanwhile, another user's, or locked: alive
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            _log.info("removed %s, left by a process that died", path)
        finally:
            os.close(descriptor)


def _remove(path: Path, descriptor: int, owner: int) -> None:
    """Unlink and unlock, in the process that made it: forked children inherit this, too."""
    if os.getpid() == owner:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _free_bytes(directory: Path) -> int:
    """What the file system and the machine can spare; cgroup limits are not looked at."""
    try:
        room = os.statvfs(directory)
    except OSError:
        return 0
    words = Path("/proc/meminfo").read_text(encoding="ascii").split()
    available = int(words[words.index("MemAvailable:") + 1]) * 1024
    return min(room.f_bavail * room.f_frsize, available)
