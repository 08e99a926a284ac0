"""Directories owned by one process, and removed with it or by the next process.

Only a directory whose owner is certainly dead is removed or taken over. An owner holds a lock
(flock) on a file in its directory for as long as it lives; the kernel drops the lock with the
process, however the process ends and in whichever container. On a file system that several machines
share, one machine may not see the locks of another: so the file holds the boot id of the kernel
under which it was locked.
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
    """The directory existed, and this file system has no locks to show whether its owner lives."""
    OTHER_KERNEL = enum.auto()
    """Its owner ran on another machine, or before this machine's last boot."""
    NEVER_OWNED = enum.auto()
    """No owner has made the directory, or the path is no directory."""


class DirectoryTaken(OSError):
    """A directory belongs to another process, or may; `why` is the reason."""

    def __init__(self, path: Path, why: Taken) -> None:
        super().__init__(f"{path} may belong to another process: {why.name}")
        self.why = why


class OwnedDir:
    """A directory owned by this process."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    def remove(self) -> None:
        """Remove the directory with its contents, and release its lock; safe to call twice."""
        if self._lock >= 0:
            _remove(self.path)
            os.close(self._lock)
            self._lock = -1


def make(parent: Path, prefix: str) -> OwnedDir:
    """A new directory whose name begins with `prefix`. Raises OSError."""
    return claim(parent / f"{prefix}{secrets.token_hex(8)}")


def claim(path: Path, *, only_left: bool = False) -> OwnedDir:
    """Own a directory: a new one, or one that a dead process has left, with its contents.

    Its parent exists. `only_left`: take over an existing directory only; make none.

    Raises:
        DirectoryTaken: It belongs to another process, or may.
        OSError: It cannot be made; with `only_left`: it does not exist.
    """
    while True:
        is_new = not only_left and _make_directory(path)
        try:
            flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | (0 if only_left else os.O_CREAT)
            lock_file = os.open(path / OWNER, flags, 0o600)
        except FileNotFoundError:
            if only_left or path.is_symlink():  # a link that leads nowhere
                raise
            continue  # its owner removed it between the two calls
        try:
            try:
                is_free, can_lock = lock(lock_file), True
            except OSError:  # a file system without locks
                is_free, can_lock = True, False
            if not is_free:
                raise DirectoryTaken(path, Taken.OWNER_LIVES)
            if can_lock and not _is_at(lock_file, path / OWNER):  # its owner has just removed it
                os.close(lock_file)
                continue
            if not is_new:
                _check_left(lock_file, path, can_lock=can_lock)
            # Only now may others sweep it: they take a directory without a boot id for one in the
            # making, or one that was made on a file system without locks.
            if can_lock:
                with contextlib.suppress(OSError):  # a full disk: nobody sweeps this one
                    os.ftruncate(lock_file, 0)
                    os.write(lock_file, _BOOT_ID.read_bytes())
        except BaseException:
            os.close(lock_file)
            raise
        return OwnedDir(path, lock_file)


def sweep(parent: Path, names: str, *, spare: str = "", grace_s: float = 0.0) -> list[Path]:
    """Remove the directories that dead processes of this user have left; never raises.

    Those in `parent` whose names match the pattern `names` and not `spare`. One that was used
    within the last `grace_s` seconds stays, for a successor. Returns those removed.
    """
    removed: list[Path] = []
    with contextlib.suppress(OSError):
        for path in set(parent.glob(names)) - set(parent.glob(spare) if spare else ()):
            with contextlib.suppress(OSError):  # gone meanwhile, or never owned
                if path.lstat().st_uid != os.geteuid():
                    continue
                lock_file = os.open(path / OWNER, os.O_RDWR | os.O_CLOEXEC)
                try:
                    # Read before locking: a directory in the making has no boot id yet, and its
                    # maker must find no lock there.
                    if os.pread(lock_file, 64, 0) != _BOOT_ID.read_bytes() or not lock(lock_file):
                        continue
                    # Files were last made or removed there, or one level below, at this
                    # wall-clock time.
                    below = [Path(entry.path) for entry in os.scandir(path) if entry.is_dir()]
                    used_at_s = max(one.stat().st_mtime for one in (path, *below))
                    if not _is_at(lock_file, path / OWNER) or time.time() - used_at_s < grace_s:
                        continue
                    _remove(path)
                finally:
                    os.close(lock_file)
                removed.append(path)
    return removed


def clear(path: Path) -> None:
    """Remove the contents of an owned directory; never raises."""
    with contextlib.suppress(OSError):
        for one in path.iterdir():
            if one.is_dir() and not one.is_symlink():
                shutil.rmtree(one, ignore_errors=True)
            elif one.name != OWNER:
                one.unlink(missing_ok=True)


def lock(file: int, timeout_s: float = 0.0) -> bool:
    """Lock an open file (flock), waiting at most `timeout_s`; returns whether it is locked.

    Raises:
        OSError: This file system has no locks.
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
    """Make a directory; False if it existed. Raises DirectoryTaken if it is no directory."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:  # it may be gone again by now: the caller then begins anew
        if path.exists() and not path.is_dir():
            raise DirectoryTaken(path, Taken.NEVER_OWNED) from None
        return False
    return True


def _check_left(lock_file: int, path: Path, *, can_lock: bool) -> None:
    """Raises DirectoryTaken for an existing directory that may belong to another process."""
    if not can_lock:
        raise DirectoryTaken(path, Taken.NO_LOCKS)
    kernel = os.pread(lock_file, 64, 0)
    if kernel not in (b"", _BOOT_ID.read_bytes()):
        raise DirectoryTaken(path, Taken.OTHER_KERNEL)
    if not kernel and any(one.name != OWNER for one in path.iterdir()):
        # This call may have made the file: somebody else's directory stays as it was.
        (path / OWNER).unlink()
        raise DirectoryTaken(path, Taken.NEVER_OWNED)


def _remove(path: Path) -> None:
    clear(path)
    with contextlib.suppress(OSError):
        (path / OWNER).unlink()  # last: without it nobody sweeps what an interruption has left
        path.rmdir()


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
