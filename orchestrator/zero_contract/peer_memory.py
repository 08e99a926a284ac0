"""The wire protocol of peer memory: replicated in-memory checkpoints travel between nodes.

An agent serves the in-memory checkpoints of its node; workers of the job, on any node, put a copy
of their image there, and read ranges of it. A connection begins with a mutual proof: each end
proves over the other's nonce (HMAC-SHA256) that it knows the key. Then the client sends requests,
each a JSON record preceded by its length, 4 bytes big-endian:

    Put, then (if the first Reply is ok) the bytes of the file  -> Reply, Reply
    Get                                                         -> Reply, then `length` bytes

Must always hold: nothing is received before its size is known and bounded; no wait is longer
than the timeout of its socket; a path has the one form that `FILE` allows, so it cannot leave the
directory. The key authenticates a connection, but the bytes are neither signed nor encrypted;
readers verify their checksums against a manifest.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
import re
import secrets
import socket
from dataclasses import dataclass

CONNECT_TIMEOUT_S = 2.0
TRANSFER_TIMEOUT_S = 5.0
"""A peer that sends no byte for this long is treated as hung."""
RECORD_LIMIT_BYTES = 16 << 20
"""A Put has one digest per block: this limit is enough for an image of terabytes."""
FILE = re.compile(
    r"[0-9a-f]{16}/step-\d{9,}\.g\d+\.[0-9a-f]{4}/(r\d{5,}\.safetensors|MANIFEST\.json)"
)
"""The form of a path: owner of the checkpoints / checkpoint / file of it."""

_LENGTH_BYTES = 4
_NONCE_BYTES = 16
_PROOF_BYTES = 32


class WireError(ConnectionError):
    """The peer does not know the key, or sends what is not of this protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """Request: store the file whose bytes follow."""

    path: str
    size_bytes: int
    block_bytes: int
    digests: str
    """XXH3-64 of each block, 16 hex digits each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Get:
    """Request: send `length` bytes of a file from `offset`."""

    path: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer to a request; after a Get, `length` bytes of the file follow."""

    ok: bool
    reason: str = ""
    length: int = 0


Record = Put | Get | Reply
_KINDS: dict[str, type[Record]] = {kind.__name__: kind for kind in (Put, Get, Reply)}


# ---- authentication ----


def key_of(secret: str) -> str:
    """The key to the peer memory of a job, derived one-way from the job's secret."""
    return hmac.new(secret.encode(), b"zero-ram", "sha256").hexdigest()


def serve_greeting(connection: socket.socket, key: str) -> None:
    """The server's part of the mutual proof. Raises WireError, OSError."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(nonce)
    theirs = receive(connection, _NONCE_BYTES + _PROOF_BYTES)
    if not hmac.compare_digest(theirs[_NONCE_BYTES:], _proof(key, b"client", nonce)):
        raise WireError("the caller does not know the job's secret")
    connection.sendall(_proof(key, b"server", theirs[:_NONCE_BYTES]))


def dial(address: str, key: str) -> socket.socket:
    """An authenticated connection to the peer memory at `host:port`.

    Raises:
        WireError: The server does not know the key.
        OSError: The server cannot be reached, or does not answer in time.
    """
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        theirs = receive(connection, _NONCE_BYTES)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(nonce + _proof(key, b"client", theirs))
        if not hmac.compare_digest(
            receive(connection, _PROOF_BYTES), _proof(key, b"server", nonce)
        ):
            raise WireError(f"{address} does not know the job's secret")
        connection.settimeout(TRANSFER_TIMEOUT_S)
    except BaseException:
        connection.close()
        raise
    return connection


def _proof(key: str, role: bytes, nonce: bytes) -> bytes:
    # The role is part of the proof, lest a proof by one end be replayed as the other's.
    return hmac.new(key.encode(), role + nonce, "sha256").digest()


# ---- records ----


def send(connection: socket.socket, record: Record) -> None:
    """Send a record. Raises OSError."""
    text = json.dumps({"kind": type(record).__name__, **dataclasses.asdict(record)}).encode()
    connection.sendall(len(text).to_bytes(_LENGTH_BYTES, "big") + text)


def receive_record(connection: socket.socket) -> Record:
    """The next record.

    Raises:
        WireError: What came is no record, or too long.
        EOFError: The peer closed the connection between two records.
        OSError: The connection failed, or nothing came in time.
    """
    first = connection.recv(_LENGTH_BYTES)
    if not first:
        raise EOFError
    length = int.from_bytes(first + receive(connection, _LENGTH_BYTES - len(first)), "big")
    if length > RECORD_LIMIT_BYTES:
        raise WireError(f"a record of {length} bytes; at most {RECORD_LIMIT_BYTES} are allowed")
    text = receive(connection, length)
    try:
        values = json.loads(text)
        kind = _KINDS[values.pop("kind")]
        record = kind(**values)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WireError(f"not a record of this protocol: {text[:100]!r}") from error
    for field in dataclasses.fields(record):
        # The peer is not trusted: each field must have its type, and no number is negative.
        value = getattr(record, field.name)
        if type(value).__name__ != str(field.type):
            raise WireError(f"{field.name} is not a {field.type}")
        if isinstance(value, int) and value < 0:
            raise WireError(f"{field.name} is negative")
    return record


def receive_reply(connection: socket.socket) -> Reply:
    """The next record, which must be a Reply. Raises WireError, OSError."""
    try:
        record = receive_record(connection)
    except EOFError:
        raise WireError("the peer hung up") from None
    if not isinstance(record, Reply):
        raise WireError(f"received a {type(record).__name__} instead of a Reply")
    return record


# ---- bytes ----


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
