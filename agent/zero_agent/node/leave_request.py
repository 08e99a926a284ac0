"""`zero_agent.should_leave()`: any script may be asked to save and leave, and is waited for.

A worker's file for it is named in its environment, ZERO_LEAVE_FILE. A script that asks for the
first time makes it, empty, by which the agent knows that it will be heard; the agent writes into it
when the worker is to leave. A shell script does `touch $ZERO_LEAVE_FILE` first, and
`[ -s $ZERO_LEAVE_FILE ]` after each step.

Must always hold: `should_leave` costs microseconds, raises nothing, and is False outside an agent.
Who calls it: users' scripts; `LeaveRequests`: the node's workers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

ENV_FILE = "ZERO_LEAVE_FILE"
LEFT = 76
"""Both as in the contract; nothing is imported for a script's question."""


def should_leave() -> bool:
    """Whether the agent wants this worker to save and to call `leave()`; ask after each step.

    Ranks hear of it one after the other. Let them agree before they act, so that all of them save
    after the same step.
    """
    path = os.environ.get(ENV_FILE)
    if path is None:
        return False
    try:
        return os.stat(path).st_size > 0
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError:
        pass
    return False


def leave() -> None:
    """End this worker, which has saved: the job goes on, and no restart is charged.

    A shell script does `exit 76`. An exit with 0 says that the job is done.

    Raises:
        SystemExit: Always.
    """
    raise SystemExit(LEFT)


class LeaveRequests:
    """The agent's side: what a round's workers can be asked."""

    def __init__(self, files: Mapping[int, Path]) -> None:
        """Nobody has been asked yet.

        Args:
            files: Of each worker, by rank; it need not exist before the script asks.
        """
        self._files = files

    def heard(self, rank: int) -> bool:
        """Whether this worker asks, and so will hear that it is to leave."""
        file = self._files.get(rank)
        return file is not None and file.exists()

    def ask(self) -> int:
        """Ask all workers that will hear it to leave; how many those are."""
        heard = [file for rank, file in self._files.items() if self.heard(rank)]
        for file in heard:
            with contextlib.suppress(OSError):  # it is waited for no longer than it may take
                file.write_bytes(b"1")
        return len(heard)
