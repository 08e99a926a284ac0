"""Directories that belong to one process, and go with it or with the next.

Must always hold: only what surely belongs to nobody is removed or taken over. An owner holds a
lock (flock) on a file in its directory for as long as it lives; the kernel drops the lock with the
process, whatever ends that, in whichever container. On a file system that several machines share,
such locks may be known to one of them alone: so the file names the kernel that it was locked under.
A directory without that name is being made, or was made where there are no locks: nobody sweeps it.
The file goes last, so what an interrupted removal has left is swept as well.

Called by the agent (temporary directories, memory for checkpoints, its etcd) and by exports.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import secrets
import shutil
import time
from pathlib import Path

OWNER = ".owner"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_POLL_S = 0.05


class Taken(enum.Enum):
    """Why a directory cannot be had."""

    OWNER_LIVES = enum.auto()
    NO_LOCKS = enum.auto()
    """It was there already, and this file system cannot tell whether its owner lives."""
    OTHER_KERNEL = enum.auto()
    """Its owner ran on another machine, or before this one was started anew."""
    NEVER_OWNED = enum.auto()
    """No owner has made it, or it is no directory."""


class DirectoryTaken(OSError):
    """A directory belongs to somebody, or may."""

    def __init__(self, path: Path, why: Taken) -> None:
        super().__init__(f"{path} may belong to somebody: {why.name}")
        self.why = why


class OwnedDir:
    """A directory of this process."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    def remove(self) -> None:
        """Remove it with all that is in it, and let go of it; safe to call twice."""
        if self._lock >= 0:
            _remove(self.path)
            os.close(self._lock)
            self._lock = -1


def make(parent: Path, prefix: str) -> OwnedDir:
    """A new directory whose name begins so. Raises OSError."""
    return claim(parent / f"{prefix}{secrets.token_hex(8)}")


def claim(path: Path, *, only_left: bool = False) -> OwnedDir:
    """Own this directory: a new one, or what a process that died has left, with all that is in it.

    Args:
        path: Its parent is there.
        only_left: Make none.

    Raises:
        DirectoryTaken: It is somebody's, or may be.
        OSError: It cannot be made; with `only_left`: it is not there.
    """
    while True:
        is_new = not only_left and _make_directory(path)
        try:
            flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | (0 if only_left else os.O_CREAT)
            lock_file = os.open(path / OWNER, flags, 0o600)
        except FileNotFoundError:
            if only_left:
                raise
            continue  # its owner has removed it between the two calls
        try:
            can_lock = _lock_owner(lock_file, path)
            if can_lock and not _is_at(lock_file, path / OWNER):  # its owner has just removed it
                os.close(lock_file)
                continue
            if not is_new:
                _check_left(lock_file, path, can_lock=can_lock)
            if can_lock:
                with contextlib.suppress(OSError):  # a full disk: nobody sweeps this one
                    os.ftruncate(lock_file, 0)
                    os.write(lock_file, _BOOT_ID.read_bytes())
        except BaseException:
            os.close(lock_file)
            raise
        return OwnedDir(path, lock_file)


def sweep(parent: Path, names: str, *, spare: str = "", grace_s: float = 0.0) -> list[Path]:
    """Remove what dead processes of this user have left; never raises.

    Args:
        parent: Where.
        names: A pattern of the names of directories that `make` made.
        spare: Another, of what is left alone.
        grace_s: What was in use so recently stays, for a successor.

    Returns:
        What was removed.
    """
    removed: list[Path] = []
    with contextlib.suppress(OSError):
        for path in set(parent.glob(names)) - set(parent.glob(spare) if spare else ()):
            with contextlib.suppress(OSError):  # gone meanwhile, or not owned at all
                if path.lstat().st_uid == os.geteuid() and _remove_if_left(path, grace_s):
                    removed.append(path)
    return removed


def clear(path: Path) -> None:
    """Remove what is in an owned directory; never raises."""
    with contextlib.suppress(OSError):
        for one in path.iterdir():
            if one.is_dir() and not one.is_symlink():
                shutil.rmtree(one, ignore_errors=True)
            elif one.name != OWNER:
                one.unlink(missing_ok=True)


def lock(file: int, timeout_s: float = 0.0) -> bool:
    """Lock an open file, waiting at most so long; whether it was locked.

    Raises:
        OSError: There are no locks on this file system.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # both mean: another holds it
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        else:
            return True


def _make_directory(path: Path) -> bool:
    """Whether it was made just now; else it was there."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if path.exists() and not path.is_dir():
            raise DirectoryTaken(path, Taken.NEVER_OWNED) from None
        return False
    return True


def _lock_owner(lock_file: int, path: Path) -> bool:
    """Whether its lock is held now; there are file systems without locks."""
    try:
        is_free = lock(lock_file)
    except OSError:
        return False
    if not is_free:
        raise DirectoryTaken(path, Taken.OWNER_LIVES)
    return True


def _check_left(lock_file: int, path: Path, *, can_lock: bool) -> None:
    """Refuse what may belong to somebody."""
    if not can_lock:
        raise DirectoryTaken(path, Taken.NO_LOCKS)
    kernel = os.pread(lock_file, 64, 0)
    if kernel not in (b"", _BOOT_ID.read_bytes()):
        raise DirectoryTaken(path, Taken.OTHER_KERNEL)
    if not kernel and any(one.name != OWNER for one in path.iterdir()):
        (path / OWNER).unlink()
        raise DirectoryTaken(path, Taken.NEVER_OWNED)


def _remove_if_left(path: Path, grace_s: float) -> bool:
    """Whether it was a dead process's, and is gone now. Raises OSError."""
    lock_file = os.open(path / OWNER, os.O_RDWR | os.O_CLOEXEC)
    try:
        # Read first: one that is being made has no kernel's name yet, and must find no lock there.
        if os.pread(lock_file, 64, 0) != _BOOT_ID.read_bytes() or not lock(lock_file):
            return False
        if not _is_at(lock_file, path / OWNER) or time.time() - _used_at_s(path) < grace_s:
            return False
        _remove(path)
    finally:
        os.close(lock_file)
    return True


def _remove(path: Path) -> None:
    clear(path)
    with contextlib.suppress(OSError):
        (path / OWNER).unlink()  # the last: a directory without one is nobody's
        path.rmdir()


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _used_at_s(path: Path) -> float:
    """When files were last made or removed there, a level down as well; by the wall clock."""
    below = [Path(entry.path) for entry in os.scandir(path) if entry.is_dir()]
    return max(one.stat().st_mtime for one in (path, *below))
