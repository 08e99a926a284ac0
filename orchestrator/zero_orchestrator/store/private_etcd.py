"""The private etcd servers of this machine: `zero-ctl` finds a job of one node without flags.

`zero-agent --standalone`, and a job of one node without an endpoint, have an etcd at a port of its
own. The agent notes its endpoint in the temporary directory of that server.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from zero_orchestrator.addresses import split_host_port
from zero_orchestrator.errors import SpecError

PREFIX = "zero-etcd-"
"""The beginning of the names of the servers' directories."""
_NOTE = "endpoint"
_ANSWER_S = 1.0


def state_directory() -> Path:
    """The directory of files that outlive an agent: the data of its servers, how its jobs ended."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state, "zero-elastic")


def note(directory: Path, endpoint: str) -> None:
    """Note the endpoint of the server in its directory, which an agent owns."""
    (directory / _NOTE).write_text(endpoint, encoding="utf-8")


def running(parents: Sequence[Path]) -> list[str]:
    """The endpoints of this user's private servers that answer."""
    found = []
    for path in sorted(each for parent in parents for each in parent.glob(f"{PREFIX}*/{_NOTE}")):
        with contextlib.suppress(OSError, UnicodeDecodeError):  # its agent ends meanwhile
            # The directory is open to all: a note of another user could lead anywhere, or be a pipe
            # that nobody writes to.
            is_own = path.lstat().st_uid == os.geteuid()
            if is_own and _answers(endpoint := path.read_text(encoding="utf-8")):
                found.append(endpoint)
    return found


def choose(default: str, parents: Sequence[Path] | None = None) -> str:
    """The endpoint for a command that names none: `default`, the shared server, or the private one.

    Private ones are looked for in `parents`, by default the temporary directories of this user.

    Raises:
        SpecError: Only private servers answer, and there are several.
    """
    if _answers(default):
        return default
    known = running(parents or [*dict.fromkeys((Path(tempfile.gettempdir()), Path("/tmp")))])
    if len(known) > 1:
        flags = ", ".join(f"--rdzv-endpoint={endpoint}" for endpoint in known)
        raise SpecError(
            f"{len(known)} jobs of one node run on this machine, each with an etcd of its own: "
            f"name one of them with {flags}"
        )
    return known[0] if known else default


def _answers(endpoint: str) -> bool:
    # A note may hold anything: ValueError for a port that is no number, OverflowError for a large.
    with contextlib.suppress(OSError, ValueError, OverflowError):
        socket.create_connection(split_host_port(endpoint), timeout=_ANSWER_S).close()
        return True
    return False
