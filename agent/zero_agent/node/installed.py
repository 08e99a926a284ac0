"""Detects that the installed packages were upgraded under a running agent.

`pip install -U` replaces the files of a running agent, which would then start a child process of
the new version and misunderstand it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import zero_agent
import zero_orchestrator


class Installed:
    """The files as they were at the beginning."""

    def __init__(self, *directories: Path) -> None:
        """Record time of modification and size of each file; by default those of the agent."""
        own = [Path(package.__path__[0]) for package in (zero_agent, zero_orchestrator)]
        self._directories = directories or tuple(own)
        self._before = self._look()

    @property
    def changed(self) -> Path | None:
        """A file that was written, removed or added since; None if there is none."""
        now = self._look()
        differing = {path for path, _ in self._before.items() ^ now.items()}
        return min(differing, default=None)

    def _look(self) -> dict[Path, tuple[int, int]]:
        found = {}
        for directory in self._directories:
            # The sources alone: any import may write a `.pyc`.
            for path in directory.rglob("*.py"):
                with contextlib.suppress(OSError):  # removed at this moment: it differs
                    state = path.stat()
                    found[path] = (state.st_mtime_ns, state.st_size)
        return found
