"""Why a process does not end after SIGKILL, as /proc shows it: state, wait channel, kernel stack.

A process in an uninterruptible sleep (a GPU that fell off the bus, a hung NFS server), in a frozen
cgroup or held by a tracer keeps SIGKILL pending for as long as that lasts, perhaps for ever.
Must always hold: nothing here waits, and nothing raises.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

GIVE_UP_S = 20.0
"""How long the agent waits for a process to end after SIGKILL."""
_STATES = {
    "D": "uninterruptible sleep",
    "R": "running",
    "S": "sleeping",
    "T": "stopped",
    "t": "held by a tracer",
    "Z": "zombie",
}
_FRAMES = 8
"""How many frames of a kernel stack are shown: the innermost ones."""


def describe(pid: int, proc: Path = Path("/proc")) -> str:
    """`process 7 (python) in state D (uninterruptible sleep), waiting in nfs_wait; stack: ...`.

    Args:
        pid: The process; its thread in state D, if there is one, is described.
        proc: The mount point of procfs.
    """
    threads = sorted((proc / str(pid) / "task").glob("*"), key=lambda path: _state(path) != "D")
    if not threads:
        return f"process {pid}, of which /proc shows nothing"
    thread = threads[0]
    state = _state(thread)
    words = [f"process {pid} ({_read(thread / 'comm')}) in state {state}"]
    words += [f" ({_STATES[state]})"] if state in _STATES else []
    wchan = _read(thread / "wchan")
    words += [f", waiting in {wchan}"] if wchan not in ("", "0") else []
    status = _read(thread / "status").splitlines()
    tracer = next((line.split()[1] for line in status if line.startswith("TracerPid:")), "")
    words += [f", traced by process {tracer}"] if tracer not in ("", "0") else []
    frames = [line.split()[-1].split("+")[0] for line in _read(thread / "stack").splitlines()]
    words += [f"; kernel stack: {' < '.join(frames[:_FRAMES])}"] if frames else []
    return "".join(words)


def _state(thread: Path) -> str:
    fields = _read(thread / "stat").rpartition(")")[2].split()
    return fields[0] if fields else "?"


def _read(path: Path) -> str:
    """The text of a file; empty if it is gone, or readable by root only (stack)."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""
