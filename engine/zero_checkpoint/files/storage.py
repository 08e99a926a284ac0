"""The few file operations of a save, in one place so that tests can make each of them fail.

A save uses no other operations, so that it can also write to an object store: `object_disk`. Data
survive a power cut once `sync` and `sync_directory` have returned; `publish` is atomic. Reading
needs no such object, because tests can damage real files.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import BinaryIO

from zero_checkpoint.files.place import Place
from zero_checkpoint.format.manifest import MANIFEST

_BUFFER_BYTES = 1 << 20
"""Small pieces are gathered into writes of this size; larger ones go straight to the kernel."""
REMOVED = "removed."
"""Prefix of a name: no load reads the directory any more, and any process may delete it."""


class Disk:
    """A POSIX file system that all ranks share. Every method raises OSError when it fails."""

    block_bytes: int | None = None
    """Bytes of a block, the unit that is hashed and read back; None: `layout.block_bytes_for`."""
    publishes_late = False
    """Whether a `publish` that has failed may still take effect later."""

    def make_directories(self, path: Place) -> None:
        """Create a directory and its parents, each durable in its parent; no error if there."""
        if not path.is_dir():
            self.make_directories(path.parent)
            _local(path).mkdir(exist_ok=True)  # another process may just have made it
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

    def write_whole(self, path: Place, text: bytes) -> None:
        """Write a new small file; durable once its directory is synced."""
        with self.create(path) as file:
            self.write(file, text)
            self.sync(file)

    def sync_directory(self, path: Place) -> None:
        """Flush a directory: else a created or renamed entry may vanish in a crash."""
        descriptor = os.open(_local(path), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def publish(self, temporary: Place, final: Place, *, replace: bool = False) -> None:
        """Give a finished, synced file its final name, atomically.

        Another file has that name only if `replace` is true.
        """
        _local(temporary).replace(_local(final))

    def link(self, link: Place, name: str) -> None:
        """Make a link to `name` in the same directory; FileExistsError if `link` is no link."""
        path = _local(link)
        # Anything else of that name is the user's own, and stays.
        if path.is_symlink():
            path.unlink()
        path.symlink_to(name)

    def remove_dangling(self, directory: Place) -> None:
        """Remove the links to deleted checkpoints; links that lead elsewhere are the user's."""
        for path in _local(directory).iterdir():
            if path.is_symlink() and not path.exists() and os.readlink(path).startswith("step-"):
                path.unlink(missing_ok=True)

    def retire(self, path: Place, *, committed: bool) -> Place:
        """Make a directory stop being a checkpoint, durably, before any byte of it is gone.

        If it is not `committed`, it must not become one either. Returns its new path.
        """
        manifest = path / MANIFEST
        # First, and durably: a directory without a manifest is no checkpoint, whatever is left of
        # it.
        if committed:
            self.publish(manifest, manifest.with_name(REMOVED + MANIFEST))
            self.sync_directory(path)
        if path.name.startswith(REMOVED):  # by a deletion that died
            return path
        # A save that is still alive, and publishes into it, must fail: renamed, the directory has
        # not got the path of that save's manifest any more.
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
