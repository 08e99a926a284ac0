"""`zero_agent.should_leave()`: any script is asked to save and leave, with an agent or without.

The environment of a worker names its file for that, ZERO_LEAVE_FILE. The script's first call of
`should_leave` makes the file, empty, by which the agent knows that the script will notice a
request; the agent makes it longer when the worker is to leave. A shell script runs
`touch $ZERO_LEAVE_FILE` first, and `[ -s $ZERO_LEAVE_FILE ]` after each step.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_contract.notices import ENV_FILE, OF_MACHINE, heard

LEFT = 76
"""As in `zero_contract.worker`; `should_leave` imports little."""
_ENV_SOCKET, _ENV_LAUNCHER = "ZERO_AGENT_SOCKET", "ZERO_LAUNCHER"

_code = LEFT
"""The exit code of `leave`."""


def should_leave() -> bool:
    """Whether to save and to call `leave()` now; call it after each step, on every rank.

    With a process group of torch's this is a collective: one all-reduce of one number, so that all
    ranks save after the same step.
    """
    global _code  # noqa: PLW0603 - it is the process that leaves
    file = os.environ.get(ENV_FILE)
    alone = _ENV_SOCKET not in os.environ or _ENV_LAUNCHER in os.environ
    code = 0
    if file is not None:
        try:
            if os.stat(file).st_size > 0:
                code = OF_MACHINE if alone else LEFT
        except FileNotFoundError:  # by the empty file the agent knows that this script asks
            with contextlib.suppress(OSError):
                os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError:  # no request can be seen there: the script trains on
            pass
    # Without an agent, signals and the notices of the machine take its place.
    if alone and (notice := heard()) is not None:
        code = notice.code
    # Not imported here: a script without torch has no ranks to agree with.
    torch: Any = sys.modules.get("torch")
    dist = torch.distributed if torch is not None else None
    if dist is not None and dist.is_available() and dist.is_initialized():
        on_cpu = "gloo" in dist.get_backend_config()
        device = "cpu" if on_cpu else torch.accelerator.current_accelerator()
        # Ranks see a request at different steps: whoever sees it makes all leave after the same
        # one, with the highest code.
        codes = torch.tensor([code], device=device)
        dist.all_reduce(codes, op=dist.ReduceOp.MAX)
        code = int(codes)
    if code:
        _code = code
    return code > 0


def leave() -> None:
    """End this worker, which has saved, after `should_leave()`.

    Under an agent the job continues, and no restart is charged; a shell script runs `exit 76`. An
    exit with 0 means that the job is done. Without an agent the exit code is 128 and the number of
    the signal, that of SIGTERM for a notice of the machine: launchers do not take it for the end.

    Raises:
        SystemExit: Always.
    """
    raise SystemExit(_code)


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
