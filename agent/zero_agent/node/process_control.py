"""Linux process control that the standard library does not have: prctl, titles, child processes.

`dying_with_parent(command)` gives the command line of a command that cannot outlive the process
that starts it, however that one ends: this file, as a script, asks the kernel to end it when its
parent dies (PR_SET_PDEATHSIG, which survives `exec`) and becomes the command, under the same pid.

Source: prctl(2), proc(5).
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import threading
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_ARG_START = 45
"""Index of `arg_start` in `/proc/self/stat` after the name, `arg_end` follows: proc_pid_stat(5)."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that forked it ends; at once if it has."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended, and its death is not signalled any more
        os._exit(1)


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, instead of init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_title(title: str, name: str = "") -> None:
    """Change what `ps` and `top` show of this process and its main thread, cut to what fits."""
    try:  # where it is installed, it must find the command line first: a script may use it as well
        importlib.import_module("setproctitle").setproctitle(title)
    except ImportError:
        # The kernel reads the command line from this process's memory, between two addresses.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = int(fields[_ARG_START]), int(fields[_ARG_START + 1])
        if 0 < begin < end:  # the kernel may hide the addresses
            room = end - begin
            ctypes.memmove(begin, title.encode()[: room - 1].ljust(room, b"\0"), room)
    buffer = ctypes.create_string_buffer((name or title).encode())
    _prctl(_PR_SET_NAME, ctypes.addressof(buffer))


def children(pid: int) -> list[int]:
    """The pids of the direct children of a process, of all its threads."""
    pids: list[int] = []
    _, threads, _ = next(os.walk(f"/proc/{pid}/task"), ("", [], []))  # none once it has ended
    for thread in threads:
        try:
            pids += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
        except OSError:
            continue  # the thread ended meanwhile
    return pids


def dying_with_parent(
    command: list[str], *, to_thread: bool = False, by: signal.Signals = signal.SIGKILL
) -> list[str]:
    """The command line that runs `command`, of which the first word is a path, while we live.

    The kernel sends it the signal `by` then. With `to_thread` it may die with the calling thread.
    """
    # The kernel ties a child to the *thread* that started it.
    main = threading.current_thread() is threading.main_thread()
    assert main or to_thread, "it would die with this thread"
    # No `preexec_fn`: code between fork and exec may deadlock in a process with threads.
    # Isolated and without site packages the interpreter is up in some 10 ms.
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(by)), *command]


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


if __name__ == "__main__":
    _prctl(_PR_SET_PDEATHSIG, int(sys.argv[2]))
    if os.getppid() != int(sys.argv[1]):  # the parent died before the tie was in place
        sys.exit(f"process {sys.argv[1]}, which started {sys.argv[3]}, is gone")
    os.execv(sys.argv[3], sys.argv[3:])
