"""`zero_agent.heartbeat()`: any script may say that it gets on, and is found out when it hangs.

A worker's pulse is a file whose name is in its environment, ZERO_HEARTBEAT_FILE: each change of its
modification time is a beat, whatever made it (`touch` in a shell script will do), and what it
contains, if anything, is the number of the last finished step. The agent looks at the files of its
workers at each turn of its loop.

Must always hold: `heartbeat` costs microseconds, raises nothing and outside of an agent does
nothing. Who calls it: users' scripts; `Heartbeats`: the node's workers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

ENV_FILE = "ZERO_HEARTBEAT_FILE"
"""As `contract.ENV_HEARTBEAT`; nothing is imported for a script's heartbeat."""
_LONGEST_NUMBER = 20


def heartbeat(step: int | None = None) -> None:
    """Say that this worker gets on; call it once per step.

    Args:
        step: The step that has just ended, if steps have numbers. It is shown by `zero-ctl status`
            and tells a job that makes progress from one in a crash loop.
    """
    path = os.environ.get(ENV_FILE)
    if path is None:
        return
    with contextlib.suppress(OSError, ValueError):
        text = b"" if step is None else str(int(step)).encode()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # One write of a fixed length: a reader sees the old number or the new one.
            os.pwrite(descriptor, text.ljust(_LONGEST_NUMBER), 0)
        finally:
            os.close(descriptor)


class Heartbeats:
    """The agent's side: the pulses of a round's workers."""

    def __init__(self, files: dict[int, Path]) -> None:
        """Nothing has been felt yet.

        Args:
            files: Of each worker, by rank; it need not exist before the first beat.
        """
        self._files = files
        self._seen_ns: dict[int, int] = {}

    def beats(self) -> Iterator[tuple[int, int | None]]:
        """Ranks whose pulse has beaten since the last look, with their step if they say it."""
        for rank, file in self._files.items():
            try:
                at_ns = file.stat().st_mtime_ns
                if at_ns != self._seen_ns.get(rank):
                    self._seen_ns[rank] = at_ns
                    with file.open("rb") as content:
                        text = content.read(_LONGEST_NUMBER + 1).strip()
                    yield rank, (int(text) if text.isdigit() else None)
            except OSError:
                continue  # it has not begun to beat
