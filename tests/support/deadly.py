"""Kills this very process right before the n-th change to files below some directories.

Python tells of every change before it is made, whoever makes it: a save, a copy in memory, the
deletion of an old checkpoint, a record of samples. So each state that a crash can leave has a
number, and none has to be known by name.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CHANGES = {"os.rename": 2, "os.remove": 1, "os.mkdir": 2, "os.rmdir": 1, "os.symlink": 2}
"""Events of Python, and which argument says relative to what directory the path is."""


class Deadly:
    """Counts the changes of this process, once armed."""

    def __init__(self) -> None:
        self.changes = 0
        self._number, self._below = 0, tuple[str, ...]()
        self._lock = threading.Lock()
        self._hooked = False

    def arm(self, below: Sequence[object], number: int = 0) -> None:
        """Count from now on, and die before this change; with 0 not at all."""
        self.changes, self._number, self._below = 0, number, tuple(map(str, below))
        if not self._hooked:
            self._hooked = True
            sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._below and self._is_change(event, arguments):
            with self._lock:
                self.changes += 1
                if self.changes == self._number:
                    os.kill(os.getpid(), signal.SIGKILL)

    def _is_change(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event == "open":
            path, _, flags = arguments
            relative = False
            if not flags & _WRITES:
                return False
        elif event in _CHANGES:
            path = arguments[0]
            relative = arguments[_CHANGES[event]] not in (None, -1)  # as by shutil.rmtree
        else:
            return False
        return relative or (
            isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self._below)
        )


DEADLY = Deadly()
