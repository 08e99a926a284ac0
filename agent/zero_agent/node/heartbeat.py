"""`zero_agent.heartbeat()`: with it the agent detects that any script, in any language, hangs.

The environment of a worker names its heartbeat file, ZERO_HEARTBEAT_FILE. Each change of the file's
modification time is a heartbeat, whatever made it (`touch` in a shell script will do). The file may
contain the number of the last finished step. The agent looks at the files of its workers at each
turn of its loop.

Must always hold: `heartbeat` costs microseconds, raises nothing, and does nothing outside of an
agent.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

ENV_FILE = "ZERO_HEARTBEAT_FILE"
"""As `zero_contract.worker.ENV_HEARTBEAT`; a script's heartbeat imports nothing for it."""
_LONGEST_NUMBER = 20


def heartbeat(step: int | None = None) -> None:
    """Send a heartbeat: this worker makes progress. Call it once per step.

    Args:
        step: The number of the step that has just ended, if steps have numbers. `zero-ctl status`
            shows it, and it distinguishes a job that makes progress from one in a crash loop.
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
    """The agent's side: the heartbeat files of a round's workers."""

    def __init__(self, files: dict[int, Path]) -> None:
        """No heartbeat has been seen yet.

        Args:
            files: The heartbeat file of each rank; it need not exist before the first heartbeat.
        """
        self._files = files
        self._seen_ns: dict[int, int] = {}

    def beats(self) -> Iterator[tuple[int, int | None]]:
        """The ranks with a heartbeat since the last call, with the step that the file contains."""
        for rank, file in self._files.items():
            try:
                at_ns = file.stat().st_mtime_ns
                if at_ns != self._seen_ns.get(rank):
                    self._seen_ns[rank] = at_ns
                    with file.open("rb") as content:
                        text = content.read(_LONGEST_NUMBER + 1).strip()
                    yield rank, (int(text) if text.isdigit() else None)
            except OSError:
                continue  # this worker has not sent a heartbeat yet
