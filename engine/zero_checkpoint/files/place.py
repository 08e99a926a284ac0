"""Where checkpoints are: a directory, or a prefix in an object store.

Must always hold: a URL is never taken for a relative path, nor a path for a URL; a store is
accepted only if it can create an object that must not exist yet, because that is the commit.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeAlias

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.fetches import Fetches
from zero_checkpoint.files.local_file import open_file, open_past_cache
from zero_checkpoint.files.objects import PROTOCOLS, ObjectPath, file_system
from zero_checkpoint.files.source import Source

Place: TypeAlias = Path | ObjectPath
"""A directory or file, read like a `Path`; written with the `Disk` of `object_disk.disk_of`."""

_URL = re.compile(r"(?P<protocol>[a-z][a-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
_FLATTENED = re.compile(r"(?P<protocol>[a-z][a-z0-9+.-]*):/[^/]")


_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP})


class NoPlace(CheckpointError, ValueError):
    """A value that names no directory was given as one."""


def place(where: str | os.PathLike[str] | ObjectPath) -> Place:
    """The place that a user means by a path or a URL.

    It is absolute: a script may change its directory while it is written in the background.

    Raises:
        CheckpointError: The URL names a store that cannot be used here; the message names the
            remedy.
    """
    if isinstance(where, ObjectPath):
        return where
    if not where or not isinstance(where, str | os.PathLike):
        raise NoPlace(
            f"{where!r} is no place for checkpoints: give a directory or a URL; the working "
            'directory is "."'
        )
    text = os.fspath(where)
    url = _URL.fullmatch(text)
    if url is None:
        # A `Path` makes one slash of two: checkpoints would go into a directory called `s3:`.
        found = _FLATTENED.match(text)
        if found and found["protocol"] in PROTOCOLS:
            whole = text.replace(":/", "://", 1)
            raise CheckpointError(
                f"{text}: a URL in a Path loses a slash; give it as text: {whole!r}"
            )
        return Path(text).absolute()
    protocol, rest = url["protocol"], url["rest"]
    if protocol == "file":
        return Path("/" + rest.lstrip("/"))
    if protocol not in PROTOCOLS:
        known = ", ".join(f"{name}://" for name in PROTOCOLS)
        raise CheckpointError(
            f"{text}: checkpoints can be in directories and under {known}; mount other storage"
        )
    parts = [part for part in rest.split("/") if part]
    # To a store, dots are names like any other: another spelling of a place is another place.
    if not parts or {".", ".."} & set(parts):
        raise CheckpointError(f"{text}: write {protocol}://BUCKET/DIRECTORY")
    path = ObjectPath(f"{protocol}://{'/'.join(parts)}")
    try:
        file_system(path.url)
    except ImportError as error:
        extra = PROTOCOLS[protocol]
        raise CheckpointError(
            f"{text}: {error}; run: pip install 'zero-elastic[{extra}]'"
        ) from error
    return path


def exists(path: Place) -> bool:
    """Whether there is anything. Raises OSError, as `is_dir` does, if that cannot be told."""
    return path.exists() if isinstance(path, ObjectPath) else _mode(path) != 0


def is_dir(path: Place) -> bool:
    """Whether there is a directory."""
    return path.is_dir() if isinstance(path, ObjectPath) else stat.S_ISDIR(_mode(path))


def _mode(path: Path) -> int:
    """The mode of what is there; 0: nothing is."""
    # Not by pathlib, which takes every error for "no" from Python 3.14 on: if its storage fails,
    # a run would start from scratch.
    try:
        return path.stat().st_mode
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        return 0


def open_source(path: Place, ahead: Fetches | None = None) -> AbstractContextManager[Source]:
    """Open a file to read ranges of it, as `open_file`; an object store needs no `ahead`."""
    return open_file(path, ahead) if isinstance(path, Path) else path.source()


def open_again(path: Place) -> AbstractContextManager[Source]:
    """Open a file for a second look at bytes that were not as expected; as `open_source`."""
    return open_past_cache(path) if isinstance(path, Path) else path.source()
