"""`zero_agent.should_leave()`: the agent asks any script to save and leave, and waits for it.

On a drain, a preemption or a rebalancing a worker is to save and exit. The environment of a worker
names its file for that, ZERO_LEAVE_FILE. The script's first call of `should_leave` makes the file,
empty, by which the agent knows that the script will notice a request; the agent makes it
longer when the worker is to leave. A shell script runs `touch $ZERO_LEAVE_FILE` first, and
`[ -s $ZERO_LEAVE_FILE ]` after each step.

Must always hold: `should_leave` costs microseconds, raises nothing, and is False outside an agent.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

ENV_FILE = "ZERO_LEAVE_FILE"
LEFT = 76
"""Both as in `zero_contract.worker`; `should_leave` imports nothing for them."""


def should_leave() -> bool:
    """Whether the agent wants this worker to save and to call `leave()`; call it after each step.

    The request reaches the ranks one after the other. Let them agree before they act (an
    all-reduce of the answer), so that all of them save after the same step.
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
    """End this worker, which has saved: the job continues, and no restart is charged.

    A shell script runs `exit 76`. An exit with 0 means that the job is done.

    Raises:
        SystemExit: Always.
    """
    raise SystemExit(LEFT)


class LeaveRequests:
    """The agent's side: the leave files of a round's workers."""

    def __init__(self, files: Mapping[int, Path]) -> None:
        """No worker has been asked to leave yet."""
        self._files = files

    def listens(self, rank: int) -> bool:
        """Whether this worker's script calls `should_leave`, and so will notice a request."""
        file = self._files.get(rank)
        return file is not None and file.exists()

    def ask(self) -> int:
        """Ask all workers that listen to leave; returns how many those are."""
        listening = [file for rank, file in self._files.items() if self.listens(rank)]
        for file in listening:
            with contextlib.suppress(OSError):  # the wait for this worker is bounded anyway
                os.truncate(file, 1)  # a full disk has room for that: it takes none
        return len(listening)
