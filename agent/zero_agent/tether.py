"""Runs a command that cannot outlive the process that started it, however that one ends.

`tethered(command)` gives the command line to start instead: this file, as a script, asks the
kernel to end it when its parent dies (PR_SET_PDEATHSIG, which survives `exec`) and becomes the
command, under the same pid. No code runs between fork and exec in the parent's image, so
starting it is safe in a process with threads.

Must always hold: the command runs only with the tie in place. The kernel ties a child to the
*thread* that started it: start it from a thread that lives as long as the command is to, normally
the main thread. Who calls it: `etcd_process`, `checks`,
`several`, `launch`.

Source: prctl(2), PR_SET_PDEATHSIG.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def tethered(
    command: list[str], *, to_thread: bool = False, by: signal.Signals = signal.SIGKILL
) -> list[str]:
    """The command line that runs `command` (its first word a path) as long as this process.

    Args:
        command: What to run.
        to_thread: It may die with the thread that calls this; otherwise that is the main one.
        by: What the kernel sends it then; it must end of that.
    """
    main = threading.current_thread() is threading.main_thread()
    assert main or to_thread, "it would die with this thread"
    # Isolated and without site packages the interpreter is up in some 10 ms.
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(by)), *command]


def _become(parent: int, by: int, command: list[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the tie was in place
        sys.exit(f"process {parent}, which started {command[0]}, is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    _become(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
