"""A directory beside the output, where an export writes until what it wrote gets its name.

Must always hold: only what surely belongs to nobody is removed. The owner holds a lock (flock) on
a file in the directory for as long as it lives; the kernel drops the lock with the process,
whatever ends that. On a file system that several machines share, such locks may be known to one
of them alone: so the file names the kernel that it was locked under, and what was left under
another one is for people to remove.

Called by `export`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from zero_checkpoint.errors import CheckpointError

_SUFFIX = ".partial"
_OWNER = ".owner"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def workplace(out: Path) -> Iterator[Path]:
    """An empty directory on the file system of `out`, for this process alone; then it is gone.

    What an export that died has left there goes first.

    Raises:
        CheckpointError: Another export writes there, what is there is not an export's, or there
            can be no directory.
        OSError: It could not be made.
    """
    directory = out.with_name(out.name + _SUFFIX)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise CheckpointError(f"{out}: one of the directories in this path is a file") from None
    owner = _claim(directory)
    try:
        yield directory
    finally:
        _empty(directory)
        with suppress(OSError):
            (directory / _OWNER).unlink()  # the last: what has none is nobody's
            directory.rmdir()
        owner.close()


def _claim(directory: Path) -> BinaryIO:
    """Lock the file of the owner, and remove what else is there."""
    while True:
        owner, is_new = _open(directory)
        try:
            locked = _lock(owner, directory)
            if locked and not _is_there(owner, directory):  # its owner has just removed it
                owner.close()
                continue
            if not is_new:
                _check_left(owner, directory, locked=locked)
                _empty(directory)
            if locked:
                owner.truncate(0)
                owner.write(_BOOT_ID.read_bytes())
        except BaseException:
            owner.close()
            raise
        return owner


def _open(directory: Path) -> tuple[BinaryIO, bool]:
    """The file of the owner, and whether its directory has been made just now."""
    while True:
        is_new = not directory.exists()
        try:
            directory.mkdir(exist_ok=not is_new)
        except FileExistsError:
            if directory.is_dir():  # another export has made it meanwhile
                continue
            raise CheckpointError(_not_an_exports(directory)) from None
        with suppress(FileNotFoundError):  # its owner has removed it between the two calls
            return (directory / _OWNER).open("ab+", buffering=0), is_new


def _lock(owner: BinaryIO, directory: Path) -> bool:
    """Whether it is locked; there are file systems without locks.

    Raises:
        CheckpointError: Another export has locked it.
    """
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(
            f"{directory}: another export is writing here; wait for it, or write somewhere else"
        ) from None
    except OSError:
        return False
    return True


def _is_there(owner: BinaryIO, directory: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(owner.fileno()), (directory / _OWNER).stat())
    except FileNotFoundError:
        return False


def _check_left(owner: BinaryIO, directory: Path, *, locked: bool) -> None:
    """Refuse what may belong to somebody."""
    if not locked:
        raise CheckpointError(
            f"{directory} is there already, and this file system has no locks; if no export is "
            "writing there, remove it"
        )
    owner.seek(0)
    kernel = owner.read()
    if kernel not in (b"", _BOOT_ID.read_bytes()):
        raise CheckpointError(
            f"{directory}: left by an export on another machine, or before this one was started "
            "anew; if no export is writing there, remove it"
        )
    if not kernel and any(path.name != _OWNER for path in directory.iterdir()):
        (directory / _OWNER).unlink()
        raise CheckpointError(_not_an_exports(directory))


def _not_an_exports(directory: Path) -> str:
    return f"{directory} is there already, and not left by an export; remove it, or write elsewhere"


def _empty(directory: Path) -> None:
    with suppress(OSError):
        for path in directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != _OWNER:
                path.unlink(missing_ok=True)
