"""How images of checkpoints travel from the memory of one node to that of another.

An agent serves what its node keeps in memory; workers of the job, on any node, put a copy of
their image there, and read ranges of it. A connection begins with both ends proving, over the
other's nonce, that they know the key; then the client sends requests, each a JSON record behind
its length:

    Put, then (if the reply says so) the bytes of the file  -> Reply, Reply
    Get                                                     -> Reply, then so many bytes

Must always hold: nothing is received before its size is known and bounded; no wait is longer
than the timeout of its socket; a path is of the one form that `FILE` allows, so it can lead
nowhere else. A connection is trusted as far as the network that it goes through: the key opens
it, the bytes are not signed; readers verify them against a manifest.

Who calls it: `zero_agent.node.memory_server` is one end, `zero_checkpoint.memory.peers` the other.
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
"""Without a byte for so long the other end is taken for stopped."""
RECORD_LIMIT_BYTES = 16 << 20
"""A Put names one digest for every block: this is enough for an image of terabytes."""
FILE = re.compile(
    r"[0-9a-f]{16}/step-\d{9,}\.g\d+\.[0-9a-f]{4}/(r\d{5,}\.safetensors|MANIFEST\.json)"
)
"""What a path is: whose checkpoints, which checkpoint, which of its files."""

_LENGTH_BYTES = 4
_NONCE_BYTES = 16
_PROOF_BYTES = 32


class WireError(ConnectionError):
    """The other end does not know the key, or says what this protocol does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """Keep the file whose bytes follow."""

    path: str
    size_bytes: int
    block_bytes: int
    digests: str
    """XXH3-64 of each block, 16 hex digits each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Get:
    """Send a range of a file."""

    path: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer; after a Get `length` bytes of the file follow, fewer where it ends."""

    ok: bool
    reason: str = ""
    length: int = 0


Record = Put | Get | Reply
_KINDS: dict[str, type[Record]] = {kind.__name__: kind for kind in (Put, Get, Reply)}


# ---- who is who ----


def key_of(secret: str) -> str:
    """The key to the memory of a job's nodes: of no use for anything else its secret opens."""
    return hmac.new(secret.encode(), b"zero-ram", "sha256").hexdigest()


def serve_greeting(connection: socket.socket, key: str) -> None:
    """The server's part of the proof. Raises WireError, OSError."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(nonce)
    theirs = receive(connection, _NONCE_BYTES + _PROOF_BYTES)
    if not hmac.compare_digest(theirs[_NONCE_BYTES:], _proof(key, b"client", nonce)):
        raise WireError("the caller does not know the job's secret")
    connection.sendall(_proof(key, b"server", theirs[:_NONCE_BYTES]))


def dial(address: str, key: str) -> socket.socket:
    """A connection to the memory at `host:port`, both ends proven.

    Raises:
        WireError: It does not know the key.
        OSError: It cannot be reached, or does not answer in time.
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
    # With the role, lest an answer to one end serve as an answer to the other.
    return hmac.new(key.encode(), role + nonce, "sha256").digest()


# ---- what is said ----


def send(connection: socket.socket, record: Record) -> None:
    """Send a record. Raises OSError."""
    text = json.dumps({"kind": type(record).__name__, **dataclasses.asdict(record)}).encode()
    connection.sendall(len(text).to_bytes(_LENGTH_BYTES, "big") + text)


def hear(connection: socket.socket) -> Record:
    """The next record.

    Raises:
        WireError: It is none, or too long.
        EOFError: The other end has hung up, between two records.
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
        # Other ends may be of any intent: a field is of its type, and a number not negative.
        value = getattr(record, field.name)
        if type(value).__name__ != str(field.type):
            raise WireError(f"{field.name} is not a {field.type}")
        if isinstance(value, int) and value < 0:
            raise WireError(f"{field.name} is negative")
    return record


def hear_reply(connection: socket.socket) -> Reply:
    """The next record, which must be a Reply. Raises WireError, OSError."""
    try:
        record = hear(connection)
    except EOFError:
        raise WireError("the other end hung up") from None
    if not isinstance(record, Reply):
        raise WireError(f"a {type(record).__name__} where a reply was due")
    return record


# ---- bytes ----


def receive(connection: socket.socket, length: int) -> bytes:
    """Exactly so many bytes. Raises WireError if the other end hangs up before."""
    data = bytearray(length)
    receive_into(connection, memoryview(data))
    return bytes(data)


def receive_into(connection: socket.socket, buffer: memoryview) -> None:
    """Fill a buffer. Raises WireError if the other end hangs up before."""
    while buffer:
        count = connection.recv_into(buffer)
        if count == 0:
            raise WireError("the other end hung up")
        buffer = buffer[count:]
