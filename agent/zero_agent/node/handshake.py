"""How one end of a connection between agents proves who it is, and what is left to say of the dead.

The end that listens sends a nonce, the other one proves with it that it knows the job's secret
(HMAC) and sends a nonce of its own; with that the first one proves who it is. Nothing received is
interpreted.

A dead agent cannot say that it is dead, and that its port refuses proves nothing to another
machine. The forkserver outlives it by moments and has its listening socket: in that time it answers
in the dead agent's place, as another process of the same node, which is certain evidence.

Must always hold: no wait without a limit; the forkserver answers only when its parent, the agent,
has ended. Who calls it: `ring`, and the forkserver (`workers.forkserver`).
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import time

TIMEOUT_S = 2.0
LAST_WORD_S = 0.5
"""Whoever watches a dead agent dials again at once; a successor may need the port."""
_PARENT_S = 0.2
"""The agent's end of the forkserver's socket is closed a moment before the agent has ended."""
_POLL_S = 0.002
_LINE_BYTES = 512


def answer(connection: socket.socket, secret: str, node: str, incarnation: str) -> bool:
    """Prove to whoever has connected that this is that agent; False if it does not know the secret.

    Raises:
        OSError: It went away, or took too long.
        ValueError: It does not speak this protocol.
    """
    connection.settimeout(TIMEOUT_S)
    nonce = secrets.token_hex(16)
    connection.sendall(nonce.encode() + b"\n")
    proof, theirs = read_line(connection).split(" ")
    if not hmac.compare_digest(proof, digest(secret, nonce)):
        return False
    proof = digest(secret, f"{theirs} {node} {incarnation}")
    connection.sendall(f"{node} {incarnation} {proof}\n".encode())
    return True


def last_word(listener: socket.socket, parent: int, secret: str, node: str) -> bool:
    """In the forkserver: answer in the place of the agent, if it has ended; whether one has heard.

    Args:
        listener: The agent's.
        parent: The agent's process, as it was known when it lived.
        secret: Of the job.
        node: The agent's.
    """
    deadline_s = time.monotonic() + _PARENT_S
    while os.getppid() == parent:
        if time.monotonic() > deadline_s:
            return False  # it lives, and has let this process go
        time.sleep(_POLL_S)
    deadline_s = time.monotonic() + LAST_WORD_S
    while (left_s := deadline_s - time.monotonic()) > 0:
        listener.settimeout(left_s)
        with contextlib.suppress(OSError, ValueError), listener.accept()[0] as connection:
            if answer(connection, secret, node, f"forkserver-{os.getpid()}"):
                return True
    return False


def digest(secret: str, text: str) -> str:
    """What only those know who know the secret."""
    return hmac.new(secret.encode(), text.encode(), "sha256").hexdigest()


def read_line(connection: socket.socket) -> str:
    """A line of the other end, without its end.

    Raises:
        OSError: It hung up, or took too long.
        ValueError: It is no text.
    """
    data = b""
    while not data.endswith(b"\n"):
        more = connection.recv(_LINE_BYTES - len(data))
        if not more:
            raise ConnectionAbortedError("it hung up during the handshake")
        data += more
    return data.decode("ascii").rstrip("\n")
