"""The file operations of a save on an object store.

A store has no rename. What takes its place is the conditional put: an object is created only if
there is none of its name, and of two writers one is refused (S3 `If-None-Match: *`, GCS
`ifGenerationMatch=0`). Three things rest on it:

    a new directory     a marker in it, created so: of two saves one takes another nonce
    the commit          the manifest, created so
    a dead save swept   a tombstone under the manifest's name, created so: whoever comes second,
                        the save or the sweep, is refused

Must always hold: an object is there whole or not at all; an upload that is not `sync`ed leaves
nothing; a committed checkpoint is removed by overwriting its manifest with the tombstone, which
goes last.

Called wherever `storage.Disk` is. Source of the idea: the conditional puts that Delta Lake and
Iceberg commit with on S3.
"""

from __future__ import annotations

import errno
import io
import logging
import secrets
from collections.abc import Callable
from typing import Any, BinaryIO, cast

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.objects import ObjectPath, file_system, naming
from zero_checkpoint.files.storage import DISK, Disk
from zero_checkpoint.format.manifest import MANIFEST, TOMBSTONE
from zero_checkpoint.place import Place

_log = logging.getLogger(__name__)

MARKER = "SAVING"
"""In every directory from its first moment on; holds its name for one save."""


def disk_of(place: Place, local: Disk = DISK) -> Disk:
    """What writes there: `local` in a directory."""
    return OBJECTS if isinstance(place, ObjectPath) else local


class ObjectDisk(Disk):
    """A store that creates conditionally; see `Disk` for what the operations promise."""

    part_bytes = 32 << 20
    """What is uploaded at once; S3 allows 10,000 parts, so 312 GiB a rank."""
    publishes_late = True
    """A request whose answer is lost may be under way still."""

    def make_directories(self, path: Place) -> None:
        """Directories are but names."""

    def make_directory(self, path: Place) -> None:
        """Take a name; FileExistsError if it is taken.

        Raises:
            CheckpointError: The store does not honour the condition; two saves could both win.
        """
        marker = path / MARKER
        _create(marker, f"save {secrets.token_hex(16)} holds this name\n".encode())
        try:
            with naming(str(marker)):
                _put(marker, b"again", exclusive=True)
        except OSError:
            return
        raise CheckpointError(
            f"{path.parent}: this store ignores 'If-None-Match: *', so it cannot tell which of two "
            "saves was first; use Amazon S3, Google Cloud Storage, MinIO or another store that "
            "honours it"
        )

    def link(self, link: Place, name: str) -> None:
        """A store has no links."""

    def remove_dangling(self, directory: Place) -> None:
        """A store has no links."""

    def create(self, path: Place) -> BinaryIO:
        """Begin an upload; closed before `sync`, it is given up."""
        with naming(str(path)):
            return cast(BinaryIO, _Upload(path, self.part_bytes))

    def sync(self, file: BinaryIO) -> None:
        """Complete an upload."""
        cast(_Upload, file).complete()

    def sync_directory(self, path: Place) -> None:
        """What a store has acknowledged is durable."""

    def publish(self, temporary: Place, final: Place, *, replace: bool = False) -> None:
        """Give a finished object its final name."""
        text = temporary.read_bytes()
        if replace:
            with naming(str(final)):
                _put(final, text, exclusive=False)
        else:
            _create(final, text)
        self.remove(temporary)

    def remove(self, path: Place) -> None:
        """Remove an object; no error if it is not there."""
        try:
            with naming(str(path)):
                file_system(str(path)).rm_file(str(path))
        except FileNotFoundError:
            pass

    def remove_directory(self, path: Place) -> None:
        """It goes with its last object."""

    def retire(self, path: Place, *, committed: bool) -> Place:
        """Leave a tombstone where the manifest is, or would come to be."""
        manifest = path / MANIFEST
        if committed:
            with naming(str(manifest)):
                _put(manifest, TOMBSTONE, exclusive=False)
            return path
        try:
            _create(manifest, TOMBSTONE)
        except FileExistsError as error:
            raise CheckpointError(f"{path}: it has just been committed, so it stays") from error
        return path

    def remove_tree(self, path: Place) -> None:
        """Remove all objects of a directory, its manifest last, and what dead uploads hold."""
        for removal in (_abort_uploads, self._remove_objects):
            try:
                removal(path)
            except OSError as error:
                _log.warning("%s could not be removed: %s", path, error)

    def _remove_objects(self, path: Place) -> None:
        every: list[Place] = list(path.iterdir())
        for inner in sorted(every, key=lambda inner: inner.name == MANIFEST):
            self.remove(inner)


OBJECTS = ObjectDisk()


class _Upload(io.RawIOBase):
    """A file that becomes an object when it is complete."""

    def __init__(self, path: Place, part_bytes: int) -> None:
        self.name = str(path)
        self._file: Any = file_system(self.name).open(self.name, "wb", block_size=part_bytes)

    def write(self, data: Any) -> int:
        """Append; large parts go out at once."""
        with naming(self.name):
            return int(self._file.write(data))

    def complete(self) -> None:
        """The object is there when this returns."""
        with naming(self.name):
            self._file.close()
        self._file = None

    def close(self) -> None:
        """Give up what is not complete."""
        file, self._file = self._file, None
        super().close()
        if file is not None:
            try:
                file.discard()
            except Exception as error:  # the sweep of this directory finds what is left
                _log.warning("%s: the upload could not be aborted: %s", self.name, error)
            file.closed = True  # or its finalizer would complete it


def _put(path: Place, data: bytes, *, exclusive: bool) -> None:
    mode = "create" if exclusive else "overwrite"
    file_system(str(path)).pipe_file(str(path), data, mode=mode)


def _create(path: Place, data: bytes) -> None:
    """Create an object that must not be there.

    A retried request may be refused because of its own first attempt, whose answer was lost. So
    after a failure the store is asked what it holds; contents of two writers differ.

    Raises:
        FileExistsError: There is another one.
        OSError: The store could not be asked.
    """
    try:
        with naming(str(path)):
            _put(path, data, exclusive=True)
    except OSError as error:
        if _content(path, error) != data:
            taken = "there is such an object already"
            raise FileExistsError(errno.EEXIST, taken, str(path)) from error


def _content(path: Place, error: OSError) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        raise error from None


def _abort_uploads(path: Place) -> None:
    """S3 keeps, and charges for, the parts of an upload whose process was killed."""
    system = file_system(str(path))
    call: Callable[..., Any] | None = getattr(system, "call_s3", None)
    if call is None:
        return
    bucket, _, prefix = str(path).partition("://")[2].partition("/")
    with naming(str(path)):
        found = call("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/")
        for upload in found.get("Uploads", ()):
            key, number = upload["Key"], upload["UploadId"]
            call("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=number)
