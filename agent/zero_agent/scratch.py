"""Temporary directories that go with their process, or, if that was killed, with the next.

Must always hold: only what surely belongs to nobody is swept. An owner holds a lock (flock) on a
file in its directory for as long as it lives, and the kernel drops it with the process, whatever
ends that, in whichever container. On a file system that several machines share, such locks may be
known to one of them alone: so the file names the kernel that it was locked under.

Who calls it: the agent, and `local_etcd`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import BinaryIO

from zero_agent.signals import held

_OWNER = ".owner"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Scratch:
    """A temporary directory of this process."""

    def __init__(self, prefix: str) -> None:
        """Remove what dead processes of this user have left under this prefix, and make one."""
        with contextlib.suppress(OSError):
            _sweep(prefix)
        with held():  # from then on it goes with this object, however far that has come
            self._directory = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
        self.path = Path(self._directory.name)
        self._owner: BinaryIO | None = None
        with contextlib.suppress(OSError):  # where there are no locks, nobody sweeps
            self._owner = _claim(self.path)

    def close(self) -> None:
        """Remove it, with all that is in it; safe to call twice."""
        self._directory.cleanup()
        if self._owner is not None:
            self._owner.close()


def _claim(directory: Path) -> BinaryIO:
    """Lock its file; only when that is locked does it have the name that `_sweep` looks for."""
    boot_id = _BOOT_ID.read_bytes()
    unnamed = directory / f"{_OWNER}.new"
    owner = unnamed.open("wb")
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        owner.write(boot_id)
        owner.flush()
        unnamed.rename(directory / _OWNER)
    except OSError:
        owner.close()
        raise
    return owner


def _sweep(prefix: str) -> None:
    boot_id = _BOOT_ID.read_bytes()
    for directory in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if directory.lstat().st_uid == os.geteuid():
                _remove_if_left(directory, boot_id)


def _remove_if_left(directory: Path, boot_id: bytes) -> None:
    """Raises OSError if it is not that of a dead process of this kernel."""
    with (directory / _OWNER).open("r+b") as owner:
        if owner.read() == boot_id:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
