"""Replicates in-memory checkpoints: copies go to the replica peers, and are read by ranges.

Must always hold: a copy counts only when its receiver has verified every block; every call here is
bounded by its limits, whatever the other node does. The agent of the other node is the server.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice

from zero_checkpoint.files.source import Span
from zero_checkpoint.files.writer import Image
from zero_checkpoint.format.manifest import FileRecord
from zero_contract import handshake, peer_memory
from zero_contract.handshake import WireError
from zero_contract.peer_memory import Get, PeerSession, Put
from zero_contract.signing import Key

PUSH_LIMIT_S = 30.0
"""A replica peer that takes longer for one image is too slow to keep one."""
AVOID_S = 30.0
"""No copy is sent to a replica peer for this long after its last failure."""
LEAVING_S = 3.0
"""The time that a copy may still take when its worker wants to leave."""
_AHEAD = 16
"""Requests in flight on one connection: enough to hide the network's latency."""


def replica_peers(roster: Sequence[str], own: str, replicas: int) -> list[str]:
    """The nodes that keep copies of a node's images: the next ones in rank order.

    `roster` has the address of each rank's node; there are fewer if there are fewer other nodes.
    """
    nodes = list(dict.fromkeys(roster))  # a node has several ranks
    at = nodes.index(own)
    return (nodes[at + 1 :] + nodes[:at])[:replicas]


@dataclass(slots=True)
class ReplicaPeers:
    """Sends images to replica peers, and avoids those that have failed."""

    key: Key
    _avoid_until_s: dict[str, float] = field(default_factory=dict)
    _leave_at_s: float = field(default=math.inf, init=False)

    def set_deadline(self, limit_s: float = LEAVING_S) -> None:
        """This worker wants to leave: give up copies that are still in flight after `limit_s`."""
        self._leave_at_s = time.monotonic() + limit_s

    def send(self, address: str, path: str, image: Image, file: FileRecord, block: int) -> str:
        """Send a copy of an image to a replica peer; returns why it has none, or "".

        `path` is the copy's there, see `peer_memory.FILE`; each digest of `file` covers `block`
        bytes.
        """
        if time.monotonic() < self._avoid_until_s.get(address, 0.0):
            return f"{address} is left out for {AVOID_S:g} s after its last failure"
        try:
            limit_s = time.monotonic() + PUSH_LIMIT_S
            digests = file.digests.astype(">u8").tobytes().hex()
            put = Put(path=path, size_bytes=file.size_bytes, block_bytes=block, digests=digests)
            with closing(peer_memory.dial(address, self.key)) as session:
                session.send(put)
                # Before the first byte: a peer without room says so at once.
                _expect_consent(session)
                for chunk in image.chunks():
                    # Between chunks: a copy under way must not keep a worker that has to leave.
                    if time.monotonic() > self._leave_at_s:
                        raise TimeoutError("it was not done when this worker wanted to leave")
                    if time.monotonic() > limit_s:
                        raise TimeoutError(f"not within {PUSH_LIMIT_S:g} s")
                    session.connection.sendall(chunk)
                _expect_consent(session)
        except (OSError, EOFError) as error:  # no save is to wait for it again soon
            self._avoid_until_s[address] = time.monotonic() + AVOID_S
            return f"{address} took no copy: {error}"
        return ""


def _expect_consent(session: PeerSession) -> None:
    reply = session.receive_reply()
    if not reply.ok:
        raise ConnectionError(reply.reason)


# ---- reading back ----


def read_whole(address: str, key: Key, path: str, limit_bytes: int) -> bytes:
    """A small file of another node. Raises OSError."""
    with closing(peer_memory.dial(address, key)) as session:
        session.send(Get(path=path, offset=0, length=limit_bytes))
        reply = session.receive_reply()
        if not reply.ok or reply.length > limit_bytes:
            raise FileNotFoundError(errno.ENOENT, reply.reason)
        return handshake.receive(session.connection, reply.length)


@contextmanager
def open_remote(address: str, key: Key, path: str) -> Iterator[RemoteFile]:
    """A file of another node as a `source.Source`.

    Raises:
        OSError: ENOENT: the node has no such file; EIO: the node cannot be reached, or fails
            meanwhile.
    """
    try:
        with closing(peer_memory.dial(address, key)) as session:
            yield RemoteFile(session, path)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise
        # Whatever the cause, this copy is of no use; another one may be.
        raise OSError(errno.EIO, f"{address} does not deliver it: {error}") from error


class RemoteFile:
    """Ranges of a file over one connection; expected ranges are requested ahead."""

    def __init__(self, session: PeerSession, path: str) -> None:
        self._session = session
        self._path = path
        self._later: Iterator[Span] = iter(())
        self._requested: list[Span] = []

    def expect(self, spans: Sequence[Span]) -> None:
        """Request the first ranges; after each one that is read, the next is requested."""
        assert not self._requested, "the ranges that were expected before must be read first"
        self._later = iter(spans)
        self._request(_AHEAD)

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        """See `source.Source`; expected ranges in their order, or any range if none is expected."""
        length = sum(map(len, buffers))
        if not self._requested:
            self._later = iter([(offset, length)])
            self._request(1)
        assert self._requested.pop(0) == (offset, length), "not the range that was expected"
        reply = self._session.receive_reply()
        if not reply.ok:
            raise FileNotFoundError(errno.ENOENT, reply.reason)
        if reply.length > length:
            raise WireError(f"{reply.length} bytes instead of {length}")
        left = reply.length
        for buffer in buffers:
            part = buffer[: min(len(buffer), left)]
            handshake.receive_into(self._session.connection, part)
            left -= len(part)
        self._request(1)
        return length - reply.length

    def _request(self, count: int) -> None:
        for offset, length in islice(self._later, count):
            self._session.send(Get(path=self._path, offset=offset, length=length))
            self._requested.append((offset, length))
