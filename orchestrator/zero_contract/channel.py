"""The launcher's end of the contract with its workers: a Unix socket each worker connects to.

The launcher is zero-agent, or torchrun with our plug-in. A worker under zero_engine connects to it;
any other script never does, and is managed by signals alone. Each line is a message of
`zero_contract.worker`.
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec import structs

from zero_contract.hub import Hub
from zero_contract.worker import ContractError, Hello, Message, WaitReply, decode, encode

log = logging.getLogger("zero")

LINE_LIMIT_BYTES = 1 << 20


class Channel:
    """Listens for workers; `on_message` receives each message with the sender's rank."""

    def __init__(self, hub: Hub, path: Path, on_message: Callable[[int, Message], None]) -> None:
        self._hub = hub
        self._on_message = on_message
        self.path = str(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._peers: dict[int, _Peer] = {}
        self._numbers = itertools.count()
        hub.add(self._listener.fileno(), self._accept)

    def send(self, rank: int, message: Message) -> None:
        """Send a message to the worker with this rank, if it is connected."""
        if peer := self._peers.get(rank):
            peer.send(message)

    def hang_up(self, last: Mapping[int, Message] = MappingProxyType({})) -> None:
        """Close all connections, after a last message to some ranks: the round is over."""
        # At once: who has got its message may connect, with another rank, before this returns.
        peers, self._peers = self._peers, {}
        for rank, message in last.items():
            if rank in peers:
                peers[rank].send(message)
        for peer in peers.values():
            peer.close()

    def close(self) -> None:
        """Close the sockets."""
        self._hub.remove(self._listener, self._listener.close)
        # A copy: the hub's thread may hear one more hello meanwhile.
        for peer in list(self._peers.values()):
            peer.close()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        _Peer(self._hub, connection, next(self._numbers), self._on_peer_message)

    def _on_peer_message(self, peer: _Peer, message: Message) -> None:
        if isinstance(message, Hello):
            peer.rank, peer.round = message.rank, message.round
            held = self._peers.get(message.rank)
            # Not a latecomer: of a round before, or heard after the one that its worker made next.
            if held is None or (held.round, held.number) <= (peer.round, peer.number):
                self._peers[message.rank] = peer
        if peer.rank is None:
            raise ContractError("the first message of a worker must be its hello")
        self._on_message(peer.rank, message)


class _Peer:
    """One worker's connection."""

    def __init__(
        self,
        hub: Hub,
        connection: socket.socket,
        number: int,
        on_message: Callable[[_Peer, Message], None],
    ) -> None:
        self.number = number
        """The connections of a worker are numbered in the order in which it has made them."""
        self.rank: int | None = None
        self.round = 0
        self._hub = hub
        self._connection = connection
        self._on_message = on_message
        self._rest = b""
        connection.settimeout(1.0)  # of a send: a worker that does not read must not block us
        hub.add(connection.fileno(), self._on_readable)

    def send(self, message: Message) -> None:
        try:
            self._connection.sendall(encode(message))
        except OSError:  # it ends, or reads nothing for a second: its exit says the rest
            self.close()

    def close(self) -> None:
        self._hub.remove(self._connection, self._connection.close)

    def _on_readable(self) -> None:
        try:
            data = self._connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            for line in lines:
                self._on_message(self, decode(line))
            if len(self._rest) > LINE_LIMIT_BYTES:
                raise ContractError(f"a line of more than {LINE_LIMIT_BYTES} bytes")
        except ContractError as error:  # this worker's alone; its signals still work
            log.warning("rank %s broke the worker contract: %s", self.rank, error)
            self.close()


class WaitReplies:
    """What the workers wait for, by their replies to the newest question.

    The thread that asks waits for the replies, which arrive on the agent's thread.
    """

    def __init__(self) -> None:
        self._came = threading.Condition()
        self._replies: dict[int, WaitReply] = {}
        self._number = 0

    def add(self, rank: int, reply: WaitReply) -> None:
        """Keep the reply of a rank."""
        with self._came:
            if reply.request == self._number:  # else it answers an earlier question, too late
                self._replies[rank] = reply
                self._came.notify_all()

    def collect(
        self, ranks: Collection[int], ask: Callable[[int], None], within_s: float
    ) -> dict[int, dict[str, Any]]:
        """Ask, and wait for the replies of these ranks; the records of those that came in time."""
        with self._came:
            self._replies.clear()
            self._number += 1
            ask(self._number)
            self._came.wait_for(lambda: set(ranks) <= self._replies.keys(), within_s)
            return {rank: structs.asdict(reply) for rank, reply in self._replies.items()}
