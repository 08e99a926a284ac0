"""Mutual authentication of the two ends of a connection, for every wire between nodes.

The server sends a nonce. The client answers with a nonce of its own and a proof; the server with
its name and a proof. A proof is the signature (`signing`) of the end's role, both nonces and the
server's name, with the key of that wire. Both ends then know a key for this one connection, which
signs what they send. The caller sets the timeout of the socket.
"""

from __future__ import annotations

import secrets
import socket

from zero_contract.signing import PROOF_BYTES, Key, Purpose, derive, sign, verify

NONCE_BYTES = 16
NAME_BYTES = 1024
CLIENT, SERVER = b"client", b"server"

_LENGTH_BYTES = 2


class WireError(ConnectionError):
    """The peer does not know the key, hung up, or sends what is not of this protocol."""


class StrangerError(WireError):
    """The peer does not know the key."""


def answer(connection: socket.socket, key: Key, name: str = "") -> Key:
    """The server's part, to a client that has just connected; returns the key of this connection.

    Raises:
        StrangerError: The client does not know the key.
        WireError: It hung up.
        OSError: The connection failed, or nothing came in time.
    """
    # Both ends give a nonce: a recorded proof is of no use to either of them later.
    mine = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(mine)
    theirs, proof = _divided(receive(connection, NONCE_BYTES + PROOF_BYTES), NONCE_BYTES)
    if not verify(key, proof, CLIENT, mine, theirs):
        raise StrangerError("the caller does not know the job's secret")
    text = name.encode()
    length = len(text).to_bytes(_LENGTH_BYTES, "big")
    connection.sendall(length + text + sign(key, SERVER, mine, theirs, text))
    return derive(key, Purpose.SESSION, mine.hex(), theirs.hex())


def greet(connection: socket.socket, key: Key) -> tuple[str, Key]:
    """The client's part; returns the server's name, and the key of this connection.

    Raises:
        StrangerError: The server does not know the key.
        WireError: It hung up, or does not speak this protocol.
        OSError: The connection failed, or nothing came in time.
    """
    theirs = receive(connection, NONCE_BYTES)
    mine = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(mine + sign(key, CLIENT, theirs, mine))
    length = int.from_bytes(receive(connection, _LENGTH_BYTES), "big")
    if length > NAME_BYTES:  # nobody has proved anything yet: what it says may be a lie
        raise WireError("the other end does not speak this protocol")
    name, proof = _divided(receive(connection, length + PROOF_BYTES), length)
    if not verify(key, proof, SERVER, theirs, mine, name):
        raise StrangerError("the other end does not know the job's secret")
    return name.decode(), derive(key, Purpose.SESSION, theirs.hex(), mine.hex())


def _divided(data: bytes, at: int) -> tuple[bytes, bytes]:
    return data[:at], data[at:]


def receive(connection: socket.socket, length: int) -> bytes:
    """Exactly `length` bytes. Raises WireError if the peer hangs up before."""
    data = bytearray(length)
    receive_into(connection, memoryview(data))
    return bytes(data)


def receive_into(connection: socket.socket, buffer: memoryview) -> None:
    """Fill a buffer. Raises WireError if the peer hangs up before."""
    while buffer:
        count = connection.recv_into(buffer)
        if count == 0:
            raise WireError("the peer hung up")
        buffer = buffer[count:]
