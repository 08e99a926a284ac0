"""The few file operations of a save, in one place so that tests can make each of them fail.

Must always hold: a file is created, never overwritten; what `sync` and `sync_directory` return
from survives a power cut; `publish` is atomic.

Called by `writer`, `commit` and `candidates`. Tests subclass `Disk` to die, fail or record at
any operation; reading needs no such object, because tests can damage real files.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import BinaryIO

from zero_engine.checkpoint.manifest import BLOCK_BYTES

_BUFFER_BYTES = 1 << 20
"""Small pieces are gathered into writes of this size; larger ones go straight to the kernel."""


class Disk:
    """A POSIX file system that all ranks share. Every method raises OSError when it fails."""

    block_bytes = BLOCK_BYTES
    """What is hashed, and read back, as one unit: the manifest records it."""

    def make_directories(self, path: Path) -> None:
        """Create a directory and its parents, each durable in its parent; no error if there."""
        if not path.is_dir():
            self.make_directories(path.parent)
            path.mkdir(exist_ok=True)
            self.sync_directory(path.parent)

    def make_directory(self, path: Path) -> None:
        """Create one new directory; FileExistsError if there is one."""
        path.mkdir()

    def create(self, path: Path) -> BinaryIO:
        """Open a new file for writing; FileExistsError if there is one (O_CREAT | O_EXCL)."""
        return path.open("xb", buffering=_BUFFER_BYTES)

    def write(self, file: BinaryIO, data: memoryview | bytes) -> None:
        """Append all of `data`."""
        file.write(data)

    def sync(self, file: BinaryIO) -> None:
        """Flush a file to stable storage."""
        file.flush()
        os.fsync(file.fileno())

    def sync_directory(self, path: Path) -> None:
        """Flush a directory: without it, a created or renamed entry may vanish in a crash."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def publish(self, temporary: Path, final: Path) -> None:
        """Give a finished file its final name, atomically."""
        temporary.replace(final)

    def remove(self, path: Path) -> None:
        """Remove a file; no error if it is not there."""
        path.unlink(missing_ok=True)

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""
        path.rmdir()

    def remove_tree(self, path: Path) -> None:
        """Remove a directory and what is in it, as far as possible."""
        shutil.rmtree(path, ignore_errors=True)


DISK = Disk()
