"""The few file operations of a save, in one place so that tests can make each of them fail.

A save goes through these alone, so that it can also go to an object store: `object_disk`.

Must always hold: a file is created, never overwritten; what `sync` and `sync_directory` return
from survives a power cut; `publish` is atomic.

Called by `writer`, `commit`, `candidates` and `retention`. Tests subclass `Disk` to die, fail or
record at any operation; reading needs no such object, because tests can damage real files.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import BinaryIO

from zero_checkpoint.format.manifest import MANIFEST
from zero_checkpoint.place import Place

_BUFFER_BYTES = 1 << 20
"""Small pieces are gathered into writes of this size; larger ones go straight to the kernel."""
REMOVED = "removed."
"""Before a name: no load looks there any more, and whoever finds it may delete it."""


class Disk:
    """A POSIX file system that all ranks share. Every method raises OSError when it fails."""

    block_bytes: int | None = None
    """What is hashed, and read back, as one unit; None: as `layout.block_bytes_for` says."""
    publishes_late = False
    """Whether a `publish` that has failed may still happen, after what was done since."""

    def make_directories(self, path: Place) -> None:
        """Create a directory and its parents, each durable in its parent; no error if there."""
        if not path.is_dir():
            self.make_directories(path.parent)
            _local(path).mkdir(exist_ok=True)
            self.sync_directory(path.parent)

    def make_directory(self, path: Place) -> None:
        """Create one new directory; FileExistsError if there is one."""
        _local(path).mkdir()

    def create(self, path: Place) -> BinaryIO:
        """Open a new file for writing; FileExistsError if there is one (O_CREAT | O_EXCL)."""
        return _local(path).open("xb", buffering=_BUFFER_BYTES)

    def write(self, file: BinaryIO, data: memoryview | bytes) -> None:
        """Append all of `data`."""
        file.write(data)

    def sync(self, file: BinaryIO) -> None:
        """Flush a file to stable storage."""
        file.flush()
        os.fsync(file.fileno())

    def sync_directory(self, path: Place) -> None:
        """Flush a directory: without it, a created or renamed entry may vanish in a crash."""
        descriptor = os.open(_local(path), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def publish(self, temporary: Place, final: Place, *, replace: bool = False) -> None:
        """Give a finished file its final name, atomically.

        Args:
            temporary: Synced.
            final: Nothing must have this name, unless it may be replaced.
            replace: It may.
        """
        _local(temporary).replace(_local(final))

    def link(self, link: Place, name: str) -> None:
        """Let a link lead to its neighbour `name`; FileExistsError if something else is there."""
        path = _local(link)
        if path.is_symlink():
            path.unlink()
        path.symlink_to(name)

    def remove_dangling(self, directory: Place) -> None:
        """Remove the links to checkpoints that are gone; what leads elsewhere is somebody's own."""
        for path in _local(directory).iterdir():
            if path.is_symlink() and not path.exists() and os.readlink(path).startswith("step-"):
                path.unlink(missing_ok=True)

    def retire(self, path: Place, *, committed: bool) -> Place:
        """Make a directory stop being a checkpoint, durably, before any byte of it is gone.

        A save that is alive after all, and publishes into it, must fail. So the directory gets
        another name: the manifest of that save has nowhere to go.

        Args:
            path: The directory.
            committed: Whether it is a checkpoint; if not, it must not become one either.

        Returns:
            Where it is now.
        """
        manifest = path / MANIFEST
        if committed:
            self.publish(manifest, manifest.with_name(REMOVED + MANIFEST))
            self.sync_directory(path)
        if path.name.startswith(REMOVED):
            return path
        away = path.with_name(REMOVED + path.name)
        self.publish(path, away)
        self.sync_directory(path.parent)
        return away

    def remove(self, path: Place) -> None:
        """Remove a file; no error if it is not there."""
        _local(path).unlink(missing_ok=True)

    def remove_directory(self, path: Place) -> None:
        """Remove an empty directory."""
        _local(path).rmdir()

    def remove_tree(self, path: Place) -> None:
        """Remove a directory and what is in it, as far as possible."""
        shutil.rmtree(_local(path), ignore_errors=True)


def _local(path: Place) -> Path:
    assert isinstance(path, Path), f"{path} is in an object store; write with disk_of()"
    return path


DISK = Disk()
