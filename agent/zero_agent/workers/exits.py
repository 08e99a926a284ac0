"""How a worker ended, in words, and the error file and stacks that it left."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from zero_contract.kernel import text_of
from zero_contract.worker import ExitCode

TRACEBACK_LIMIT = 16_000
"""How many characters of a traceback, its last ones, are kept: they travel through the store."""
MESSAGE_LIMIT = 2_000
"""How many characters of a message, its first ones, are kept: it is the cause of a round, which
every agent reads, and etcd refuses a request of more than 1.5 MiB."""

_IN_WORDS: dict[int, str] = {
    ExitCode.PEER_LOST: "lost its peers",
    ExitCode.LEFT: "left as it was asked to",
}


def describe(status: int) -> str:
    """`-9` -> `killed by SIGKILL`; `3` -> `exit code 3`."""
    if status in _IN_WORDS:
        return _IN_WORDS[status]
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


GPU_DEVICE = Path("/dev/nvidiactl")
"""Exists on machines with NVIDIA GPUs."""
_GLOO = re.compile(
    r"gloo/transport/\S+\] .*(closed by peer|reset by peer|refused|timed? ?out|broken pipe)",
    re.IGNORECASE,
)
"""gloo's message about a broken connection to a peer, which it names."""
_OF_DEVICE = re.compile(r"CUDA error: .*|Cuda failure \d.*|Call to CUDA function failed.*")
"""Texts of torch and NCCL about the device of their own process."""
WATCHDOG_LINES = 50
"""The last lines of a worker in which torch's watchdog says why it ends the process."""


def device_error(printed: str) -> str:
    """What a worker's last lines say about an error of its own device; empty if they do not."""
    found = _OF_DEVICE.search(printed)
    return found[0].rstrip() if found else ""


def is_symptom(status: int, message: str, *, gpus: bool) -> bool:
    """Whether a worker has ended because of its peers, so that its own host is not to blame."""
    # A script without the engine ends with gloo's own error.
    if status == 1 and _GLOO.search(message):
        return True
    # torch's watchdog of NCCL ends a process with SIGABRT when a peer is lost or late. An error of
    # the program that ends so leaves a message, or happens without GPUs as well; of an error of the
    # device, the message is what the watchdog has printed (`device_error`).
    return status == ExitCode.PEER_LOST or (gpus and status == -signal.SIGABRT and not message)


@dataclass(frozen=True, kw_only=True)
class Exit:
    """The end of one worker."""

    rank: int
    status: int
    """Exit code, or the negative number of the signal that ended it."""
    wanted: bool
    """Whether its agent was stopping it."""
    message: str
    """The exception in one line, if the worker left one."""
    traceback: str
    local_rank: int | None = None
    pid: int | None = None
    error_file: str = ""
    """Path of its error file; empty if the worker left none."""
    permanent: bool = False
    """Whether a restart would meet the same error: the config or the arguments are wrong."""

    @classmethod
    def of(
        cls, rank: int, status: int, error_file: Path, *, wanted: bool, killer: str = ""
    ) -> Exit:
        """The end of a worker; a `killer` is its message if its error file has none."""
        # A script that has ended well has handled what `@record` may have written there.
        left = ErrorFile() if status == ExitCode.OK else read_error_file(error_file)
        return cls(
            rank=rank,
            status=status,
            wanted=wanted,
            message=left.message or killer,
            traceback=left.traceback,
            permanent=left.permanent,
        )

    @property
    def symptom(self) -> bool:
        """Whether it ended because of its peers."""
        return is_symptom(self.status, self.message, gpus=GPU_DEVICE.exists())

    @property
    def summary(self) -> str:
        """`rank 1: ValueError: no (exit code 1)`."""
        if self.message:
            return f"rank {self.rank}: {self.message} ({describe(self.status)})"
        return f"rank {self.rank}: {describe(self.status)}"


def fresh_error_file(directory: Path) -> Path:
    """The path of a new worker's error file; that of an earlier worker is renamed."""
    # Rounds share a directory: the error of an earlier one must not be taken for a new one.
    path = directory / "error.json"
    if path.exists():
        aside = (directory / f"error.{number}.json" for number in itertools.count(1))
        path.rename(next(free for free in aside if not free.exists()))
    return path


def read_stacks(paths: Mapping[int, Path]) -> str:
    """The stacks that hung workers wrote, by rank; a stopped worker wrote none."""
    found = []
    for rank, path in paths.items():
        text = text_of(path) or "(no answer: the process is stopped)"
        found.append(f"rank {rank}:\n{text}")
    return "\n".join(found)[-TRACEBACK_LIMIT:]


class ErrorFile(NamedTuple):
    """The contents of a torchelastic error file."""

    message: str = ""
    traceback: str = ""
    permanent: bool = False
    """As `Exit.permanent`; torchelastic's own files do not have it."""


def read_error_file(path: Path) -> ErrorFile:
    """Read a torchelastic error file; all is empty if there is no file."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))["message"]
        if isinstance(record, str):
            return ErrorFile(_shortened(record))
        message, facts = str(record.get("message", "")), record.get("extraInfo", {})
        # A message may have millions of characters, such as the names of all parameters that a
        # checkpoint lacks; the traceback ends with it, and would have room for nothing else.
        short = _shortened(message)
        traceback = str(facts.get("py_callstack", "")).replace(message, short)
        permanent = facts.get("permanent") is True
        return ErrorFile(short, traceback[-TRACEBACK_LIMIT:], permanent)
    # A script may write anything there, and a killed one half of it; the exit code still counts.
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return ErrorFile()


def _shortened(message: str) -> str:
    """The beginning of a long message, and how much of it is left out."""
    left_out = len(message) - MESSAGE_LIMIT
    if left_out <= 0:
        return message
    return f"{message[:MESSAGE_LIMIT]}... ({left_out:,} more characters, which --log-dir keeps)"


def leave_error_file(path: str | None, message: str, traceback: str, code: int) -> None:
    """Write the agent's own error file, if it has one, in torchelastic's format."""
    if not path:
        return
    facts = {"py_callstack": traceback, "timestamp": str(int(time.time()))}
    record = {"message": {"message": message, "extraInfo": facts, "errorCode": int(code)}}
    with contextlib.suppress(OSError):  # the message is on the log as well
        Path(path).write_text(json.dumps(record), encoding="utf-8")
