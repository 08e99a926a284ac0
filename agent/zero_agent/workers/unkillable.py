"""Why a process does not end after SIGKILL, as far as /proc says: state, wait channel, stack.

A process in an uninterruptible wait (a GPU that fell off the bus, a hung NFS server), in a frozen
cgroup or held by a tracer keeps SIGKILL pending for as long as that lasts, perhaps for ever.
Must always hold: nothing here waits, and nothing raises.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

GIVE_UP_S = 20.0
"""A process that has not ended so long after SIGKILL is not waited for any more."""
_STATES = {
    "D": "uninterruptible sleep",
    "R": "running",
    "S": "sleeping",
    "T": "stopped",
    "t": "held by a tracer",
    "Z": "zombie",
}
_FRAMES = 8
"""So many frames of a kernel stack are shown, the innermost."""


def describe(pid: int, proc: Path = Path("/proc")) -> str:
    """`process 7 (python) in state D (uninterruptible sleep), waiting in nfs_wait; stack: ...`.

    Args:
        pid: Of the process; the thread of it that is in the kernel is the one to look at.
        proc: Where procfs is mounted.
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
    tracer = _field(thread, "TracerPid:")
    words += [f", traced by process {tracer}"] if tracer not in ("", "0") else []
    frames = [line.split()[-1].split("+")[0] for line in _read(thread / "stack").splitlines()]
    words += [f"; kernel stack: {' < '.join(frames[:_FRAMES])}"] if frames else []
    return "".join(words)


def _state(thread: Path) -> str:
    fields = _read(thread / "stat").rpartition(")")[2].split()
    return fields[0] if fields else "?"


def _field(thread: Path, name: str) -> str:
    lines = _read(thread / "status").splitlines()
    return next((line.split()[1] for line in lines if line.startswith(name)), "")


def _read(path: Path) -> str:
    """What a file says; nothing if it is gone, or for root alone (stack)."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""
