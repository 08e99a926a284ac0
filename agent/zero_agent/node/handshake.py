"""Mutual authentication (HMAC challenge and response) of two agents, and evidence of a death.

The listening end sends a nonce. The other end proves with it that it knows the job's secret, and
sends its own nonce, with which the listening end proves its identity. Nothing received is
interpreted.

A dead agent cannot report its death, and a port that refuses proves nothing to another machine. The
forkserver outlives its agent by moments and inherits the listening socket: in that time it answers
in the dead agent's place, as another process of the same node, which is certain evidence.

Must always hold: no wait without a limit; the forkserver answers only when its parent, the agent,
has ended.
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
"""How long the forkserver answers for a dead agent: a watcher dials again at once, and a successor
may need the port."""
_PARENT_S = 0.2
"""The agent's end of the forkserver's socket is closed a moment before the agent has ended."""
_POLL_S = 0.002
_LINE_BYTES = 512


def answer(connection: socket.socket, secret: str, node: str, incarnation: str) -> bool:
    """Prove to the client of a connection that this process is that agent.

    Returns:
        False if the client does not know the secret.

    Raises:
        OSError: The client hung up, or took too long.
        ValueError: The client does not speak this protocol.
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
    """In the forkserver: answer one client in the place of the agent, if the agent has ended.

    Args:
        listener: The agent's listening socket.
        parent: The agent's pid, as it was when the agent lived.
        secret: The job's secret.
        node: The id of the agent's node.

    Returns:
        Whether a client was answered.
    """
    deadline_s = time.monotonic() + _PARENT_S
    while os.getppid() == parent:
        if time.monotonic() > deadline_s:
            return False  # the agent lives, and has closed its end of the socket
        time.sleep(_POLL_S)
    deadline_s = time.monotonic() + LAST_WORD_S
    while (left_s := deadline_s - time.monotonic()) > 0:
        listener.settimeout(left_s)
        with contextlib.suppress(OSError, ValueError), listener.accept()[0] as connection:
            if answer(connection, secret, node, f"forkserver-{os.getpid()}"):
                return True
    return False


def digest(secret: str, text: str) -> str:
    """The HMAC-SHA256 of a text under the job's secret, in hexadecimal."""
    return hmac.new(secret.encode(), text.encode(), "sha256").hexdigest()


def read_line(connection: socket.socket) -> str:
    """Receive one line, without its newline.

    Raises:
        OSError: The other end hung up, or took too long.
        ValueError: The line is not ASCII text.
    """
    data = b""
    while not data.endswith(b"\n"):
        more = connection.recv(_LINE_BYTES - len(data))
        if not more:
            raise ConnectionAbortedError("the other end hung up during the handshake")
        data += more
    return data.decode("ascii").rstrip("\n")
