"""From root in a new namespace to a container's command: the last step of a `sandbox`.

    become.py ROOT UID GID COMMAND...        the environment is the container's already

Run as a script, as process 1 of a new PID namespace. The kernel forgets whom to kill with its
parent when a process changes its user, so the tie is made after that; util-linux has no tool that
does it in a root that holds no programs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38


def main(root: str, uid: int, gid: int, command: list[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    os.chroot(root)
    os.chdir("/")
    os.setgroups([gid])
    os.setgid(gid)
    os.setuid(uid)  # drops what root could do
    for option, value in ((_PR_SET_NO_NEW_PRIVS, 1), (_PR_SET_PDEATHSIG, signal.SIGKILL)):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option})")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
