"""Evidence of an agent's death: its forkserver answers the ring in its place.

A dead agent cannot report its death, and a port that refuses proves nothing to another machine. The
forkserver outlives its agent by moments and inherits the listening socket: in that time it answers
in the dead agent's place, as another process of the same node, which is certain evidence.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time

from zero_contract import handshake
from zero_contract.signing import Key

TIMEOUT_S = 2.0
LAST_WORD_S = 0.5
"""How long the forkserver answers for a dead agent: a watcher dials again at once, and a successor
may need the port."""
_PARENT_S = 0.2
"""The agent's end of the forkserver's socket is closed a moment before the agent has ended."""
_POLL_S = 0.002


def answer(connection: socket.socket, key: Key, node: str, incarnation: str) -> None:
    """Prove to the client of a ring connection which agent this is. Raises WireError, OSError."""
    connection.settimeout(TIMEOUT_S)
    handshake.answer(connection, key, f"{node} {incarnation}")


def last_word(listener: socket.socket, parent: int, key: Key, node: str) -> bool:
    """In the forkserver: answer a client in the place of an agent that has ended; if it did."""
    deadline_s = time.monotonic() + _PARENT_S
    while os.getppid() == parent:
        if time.monotonic() > deadline_s:
            return False  # the agent lives, and has closed its end of the socket
        time.sleep(_POLL_S)
    deadline_s = time.monotonic() + LAST_WORD_S
    while (left_s := deadline_s - time.monotonic()) > 0:
        listener.settimeout(left_s)
        # Who hangs up, or does not know the key, is not the watcher: the next one may be.
        with contextlib.suppress(OSError), listener.accept()[0] as connection:
            answer(connection, key, node, f"forkserver-{os.getpid()}")
            return True
    return False
