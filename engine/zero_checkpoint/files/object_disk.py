"""The file operations of a save on an object store.

A store has no rename. The conditional put takes its place: an object is created only if there is
none of its name, and of two writers one is refused (S3 `If-None-Match: *`, GCS
`ifGenerationMatch=0`). Three operations use it:

    a new directory     creates a marker in it: of two saves one takes another nonce
    the commit          creates the manifest
    sweep a dead save   creates a tombstone under the manifest's name: of the save and the sweep,
                        the second is refused

Source of the idea: the conditional puts that Delta Lake and Iceberg commit with on S3.
"""

from __future__ import annotations

import errno
import io
import logging
import secrets
from collections.abc import Callable
from typing import Any, BinaryIO, cast

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.objects import ObjectPath, as_os_errors, file_system
from zero_checkpoint.files.place import Place
from zero_checkpoint.files.storage import DISK, Disk
from zero_checkpoint.format.manifest import MANIFEST, TOMBSTONE

_log = logging.getLogger(__name__)

MARKER = "SAVING"
"""The first object of every directory; reserves the directory's name for one save."""


def disk_of(place: Place, local: Disk = DISK) -> Disk:
    """The file operations of a place: `local` for a directory, `OBJECTS` for a store."""
    return OBJECTS if isinstance(place, ObjectPath) else local


class ObjectDisk(Disk):
    """A store that creates conditionally; see `Disk` for what the operations promise."""

    part_bytes = 32 << 20
    """Bytes of one part of an upload; S3 allows 10,000 parts, so 312 GiB a rank."""
    publishes_late = True
    """A request whose answer is lost may still be in flight."""

    def make_directories(self, path: Place) -> None:
        """Do nothing: directories of a store are only prefixes of names."""

    def make_directory(self, path: Place) -> None:
        """Reserve a name.

        Raises:
            FileExistsError: The name is taken.
            CheckpointError: The store ignores the condition, so two saves could both win.
        """
        marker = path / MARKER
        _create(marker, f"save {secrets.token_hex(16)} holds this name\n".encode())
        # The marker is there now: a store that takes it a second time ignores the condition, and
        # would let two saves commit the same name.
        try:
            with as_os_errors(str(marker)):
                _put(marker, b"again", exclusive=True)
        except OSError:  # refused: the store honours it
            return
        raise CheckpointError(
            f"{path.parent}: this store ignores 'If-None-Match: *', so it cannot tell which of two "
            "saves was first; use Amazon S3, Google Cloud Storage, MinIO or another store that "
            "honours it"
        )

    def link(self, link: Place, name: str) -> None:
        """Do nothing: a store has no links."""

    def remove_dangling(self, directory: Place) -> None:
        """Do nothing: a store has no links."""

    def create(self, path: Place) -> BinaryIO:
        """Begin an upload; closing it before `sync` aborts it."""
        with as_os_errors(str(path)):
            return cast(BinaryIO, _Upload(path, self.part_bytes))

    def sync(self, file: BinaryIO) -> None:
        """Complete an upload."""
        cast(_Upload, file).complete()

    def sync_directory(self, path: Place) -> None:
        """Do nothing: a write that a store has acknowledged is durable."""

    def publish(self, temporary: Place, final: Place, *, replace: bool = False) -> None:
        """Give a finished object its final name."""
        text = temporary.read_bytes()  # a store has no rename
        if replace:
            with as_os_errors(str(final)):
                _put(final, text, exclusive=False)
        else:
            _create(final, text)
        self.remove(temporary)

    def remove(self, path: Place) -> None:
        """Remove an object; no error if it is not there."""
        try:
            with as_os_errors(str(path)):
                file_system(str(path)).rm_file(str(path))
        except FileNotFoundError:
            pass

    def remove_directory(self, path: Place) -> None:
        """Do nothing: a directory vanishes with its last object."""

    def retire(self, path: Place, *, committed: bool) -> Place:
        """Put a tombstone in the place of the manifest, or where the manifest would be."""
        manifest = path / MANIFEST
        if committed:
            with as_os_errors(str(manifest)):
                _put(manifest, TOMBSTONE, exclusive=False)
            return path
        try:
            _create(manifest, TOMBSTONE)
        except FileExistsError as error:
            raise CheckpointError(f"{path}: it has just been committed, so it stays") from error
        return path

    def remove_tree(self, path: Place) -> None:
        """Remove all objects of a directory, its manifest last, and the parts of dead uploads."""
        try:
            _abort_uploads(path)
        except OSError as error:  # a store may not let everybody list uploads
            _log.warning("%s could not be removed: %s", path, error)
        try:
            every: list[Place] = list(path.iterdir())
            # Last: its tombstone says what the rest is, whenever the process dies.
            for inner in sorted(every, key=lambda inner: inner.name == MANIFEST):
                self.remove(inner)
        except OSError as error:
            _log.warning("%s could not be removed: %s", path, error)


OBJECTS = ObjectDisk()


class _Upload(io.RawIOBase):
    """A file that becomes an object when it is complete."""

    def __init__(self, path: Place, part_bytes: int) -> None:
        self.name = str(path)
        self._file: Any = file_system(self.name).open(self.name, "wb", block_size=part_bytes)

    def write(self, data: Any) -> int:
        """Append; full parts are uploaded at once."""
        with as_os_errors(self.name):
            return int(self._file.write(data))

    def complete(self) -> None:
        """Complete the upload; the object exists when this returns."""
        with as_os_errors(self.name):
            self._file.close()
        # Not before, nor if that failed: `close` then aborts what there is of the upload.
        self._file = None

    def close(self) -> None:
        """Abort the upload, unless it is complete."""
        file, self._file = self._file, None
        super().close()
        if file is not None:
            try:
                file.discard()
            except Exception as error:  # the sweep of this directory removes the parts
                _log.warning("%s: the upload could not be aborted: %s", self.name, error)
            file.closed = True  # or its finalizer would complete it


def _put(path: Place, data: bytes, *, exclusive: bool) -> None:
    mode = "create" if exclusive else "overwrite"
    file_system(str(path)).pipe_file(str(path), data, mode=mode)


def _create(path: Place, data: bytes) -> None:
    """Create an object that must not exist yet.

    Raises:
        FileExistsError: There is an object of another content.
        OSError: The request failed, and the store did not answer what it holds.
    """
    try:
        with as_os_errors(str(path)):
            _put(path, data, exclusive=True)
    except OSError as error:
        # A retried request may be refused because of its own first attempt, whose answer was lost.
        # So the content of the store decides; contents of two writers differ.
        try:
            stored = path.read_bytes()
        except OSError:
            raise error from None
        if stored != data:
            taken = "there is such an object already"
            raise FileExistsError(errno.EEXIST, taken, str(path)) from error


def _abort_uploads(path: Place) -> None:
    """Abort dead uploads."""
    # S3 keeps, and charges for, the parts of a killed process's upload; other stores do not.
    system = file_system(str(path))
    call: Callable[..., Any] | None = getattr(system, "call_s3", None)
    if call is None:
        return
    bucket, _, prefix = str(path).partition("://")[2].partition("/")
    with as_os_errors(str(path)):
        found = call("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/")
        for upload in found.get("Uploads", ()):
            key, number = upload["Key"], upload["UploadId"]
            call("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=number)
