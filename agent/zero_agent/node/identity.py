"""Which process this is, so that another agent of the same machine can see its end for certain."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def own() -> str:
    """`MACHINE/PID/START`: the kernel and its pid namespace, the process, its start there.

    Empty if /proc is not that of this process's own pid namespace.
    """
    pid = os.getpid()
    try:
        if os.readlink("/proc/self") != str(pid):  # a container with the /proc of its host
            return ""
        # The machine: the same for all processes that see each other in /proc, and for no others.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        machine = hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:12]
        return f"{machine}/{pid}/{_start(pid)}"
    except OSError:  # a /proc that hides what this needs: the lease decides
        return ""


def is_gone(identity: str) -> bool | None:
    """Whether the process of this identity has ended; None if it is, or may be, elsewhere."""
    machine, _, process = identity.partition("/")
    mine, _, _ = own().partition("/")
    if not mine or machine != mine:  # a process that lives would not be in this /proc, either
        return None
    pid, _, start = process.partition("/")
    try:
        return _start(int(pid)) != start  # another start: the pid was used again
    except (FileNotFoundError, ProcessLookupError):
        return True
    except (OSError, ValueError):
        return None


def _start(pid: int) -> str:
    """When a process began, in ticks since boot; empty for one that has ended (a zombie)."""
    # After the name of the program, which may have spaces and brackets: proc_pid_stat(5).
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]
