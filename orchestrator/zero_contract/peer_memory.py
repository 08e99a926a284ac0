"""The wire protocol of peer memory: replicated in-memory checkpoints travel between nodes.

An agent serves the in-memory checkpoints of its node; workers of the job, on any node, put a copy
of their image there, and read ranges of it. A connection begins with a `handshake`. Then the client
sends requests, each a JSON record preceded by its length, 4 bytes big-endian, and followed by the
signature of the record, its number and its sender, with the key of this connection:

    Put, then (if the first Reply is ok) the bytes of the file  -> Reply, Reply
    Get                                                         -> Reply, then `length` bytes

The bytes of files are neither signed nor encrypted; readers verify their checksums against a
manifest.
"""

from __future__ import annotations

import json
import re
import socket
from typing import Annotated

from msgspec import Meta, Struct, to_builtins

from zero_contract import handshake
from zero_contract.decoding import decode
from zero_contract.handshake import WireError
from zero_contract.signing import PROOF_BYTES, Key, sign, verify

CONNECT_TIMEOUT_S = 2.0
TRANSFER_TIMEOUT_S = 5.0
"""A peer that sends no byte for this long is treated as hung."""
RECORD_LIMIT_BYTES = 16 << 20
"""A Put has one digest per block: this limit is enough for an image of terabytes."""
FILE = re.compile(
    r"[0-9a-f]{16}/step-\d{9,}\.g\d+\.[0-9a-f]{4}/(r\d{5,}\.safetensors|MANIFEST\.json)"
)
"""The form of a path, which cannot leave the directory: owner of the checkpoints / checkpoint /
file of it."""

_LENGTH_BYTES = 4

_Size = Annotated[int, Meta(ge=0)]


class _Record(Struct, frozen=True, tag_field="kind", tag=True):
    """A JSON object, whose "kind" is the name of the class."""


class Put(_Record, frozen=True, kw_only=True):
    """Request: store the file whose bytes follow."""

    path: str
    size_bytes: _Size
    block_bytes: _Size
    digests: str
    """XXH3-64 of each block, 16 hex digits each."""


class Get(_Record, frozen=True, kw_only=True):
    """Request: send `length` bytes of a file from `offset`."""

    path: str
    offset: _Size
    length: _Size


class Reply(_Record, frozen=True, kw_only=True):
    """The answer to a request; after a Get, `length` bytes of the file follow."""

    ok: bool
    reason: str = ""
    length: _Size = 0


Record = Put | Get | Reply


# ---- authentication ----


def dial(address: str, key: Key) -> PeerSession:
    """An authenticated connection to the peer memory at `host:port`.

    Raises:
        WireError: The server does not know the key.
        OSError: The server cannot be reached, or does not answer in time.
    """
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S)
    try:
        # Requests and replies are small, and wait for each other: Nagle would delay them by 40 ms.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _, session = handshake.greet(connection, key)
        connection.settimeout(TRANSFER_TIMEOUT_S)
    except WireError as error:
        connection.close()
        raise type(error)(f"{address}: {error}") from None
    except BaseException:
        connection.close()
        raise
    return PeerSession(connection, session, handshake.CLIENT)


def serve(connection: socket.socket, key: Key) -> PeerSession:
    """The server's end of an authenticated connection. Raises WireError, OSError."""
    connection.settimeout(TRANSFER_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return PeerSession(connection, handshake.answer(connection, key), handshake.SERVER)


# ---- records ----


class PeerSession:
    """One end of an authenticated connection; every record is signed with its number."""

    def __init__(self, connection: socket.socket, key: Key, role: bytes) -> None:
        """Both ends have the same key.

        Args:
            connection: For the bytes that follow records; the session closes it.
            key: The key of this connection.
            role: Which end this is.
        """
        self.connection = connection
        self._key = key
        self._role = role
        self._peer = handshake.SERVER if role == handshake.CLIENT else handshake.CLIENT
        self._sent = self._received = 0

    def close(self) -> None:
        """Hang up."""
        self.connection.close()

    def send(self, record: Record) -> None:
        """Send a record. Raises OSError."""
        text = json.dumps(to_builtins(record)).encode()
        # With its number: no record counts that was replayed, or moved.
        proof = sign(self._key, self._role, b"%d" % self._sent, text)
        self._sent += 1
        self.connection.sendall(len(text).to_bytes(_LENGTH_BYTES, "big") + text + proof)

    def receive(self) -> Record:
        """The next record.

        Raises:
            WireError: What came is no record, is too long, or was not sent by the other end.
            EOFError: The peer closed the connection between two records.
            OSError: The connection failed, or nothing came in time.
        """
        # Only between two records may the peer hang up; within one it is an error.
        first = self.connection.recv(_LENGTH_BYTES)
        if not first:
            raise EOFError
        rest = handshake.receive(self.connection, _LENGTH_BYTES - len(first))
        length = int.from_bytes(first + rest, "big")
        if length > RECORD_LIMIT_BYTES:
            raise WireError(f"a record of {length} bytes; at most {RECORD_LIMIT_BYTES} are allowed")
        text = handshake.receive(self.connection, length)
        proof = handshake.receive(self.connection, PROOF_BYTES)
        if not verify(self._key, proof, self._peer, b"%d" % self._received, text):
            raise WireError("a record that the other end has not signed")
        self._received += 1
        return decode(Record, text, "not a record of this protocol", WireError)

    def receive_reply(self) -> Reply:
        """The next record, which must be a Reply. Raises WireError, OSError."""
        try:
            record = self.receive()
        except EOFError:
            raise WireError("the peer hung up") from None
        if not isinstance(record, Reply):
            raise WireError(f"received a {type(record).__name__} instead of a Reply")
        return record
