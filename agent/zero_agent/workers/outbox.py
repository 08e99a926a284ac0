"""Orders on their way to the nursery, which does not listen while it imports.

Must always hold: the agent never waits for the imports, so orders are held until the nursery
listens; they arrive in the order in which they were given, from whichever thread; descriptors
that go along are open until then, and closed after. Who calls it: `workers.Nursery`.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero_agent.workers.nursery import PACKET_BYTES

log = logging.getLogger("zero")


@dataclass(frozen=True, slots=True)
class _Packet:
    """An order, and copies of its descriptors."""

    id: int
    data: bytes
    fds: list[int]


class Outbox:
    """The agent's end of the nursery's socket, for sending."""

    def __init__(self, to_nursery: socket.socket) -> None:
        self._socket = to_nursery
        self._lock = threading.Lock()
        self._held: list[_Packet] = []
        self._open = self._closed = False
        self.given = 0
        """How many orders were given, without those that were withdrawn."""

    def give(self, id: int, order: Mapping[str, Any], fds: Sequence[int]) -> None:
        """Send an order about a process, or hold it; the caller may close the descriptors.

        After `close` it is dropped: the process went with the nursery.
        """
        data = json.dumps({**order, "id": id}).encode()
        if len(data) > PACKET_BYTES:
            raise ValueError(f"an order of {len(data)} bytes; arguments are limited to 128 KiB")
        with self._lock:
            if self._closed:
                return
            packet = _Packet(id, data, [os.dup(fd) for fd in fds])
            self.given += 1
            self._held.append(packet)
            if self._open:
                self._send_held()

    def listens(self) -> None:
        """The nursery listens from now on."""
        with self._lock:
            self._open = True
            self._send_held()

    def withdraw(self, id: int) -> bool:
        """Take back the order to start a process; False if it is not held any more."""
        with self._lock:
            found = [packet for packet in self._held if packet.id == id]
            self._held = [packet for packet in self._held if packet.id != id]
            self.given -= len(found)
        _close(found)
        return bool(found)

    def close(self) -> None:
        """Nothing will be sent any more, also not what is held."""
        with self._lock:
            self._closed = True
            found, self._held = self._held, []
        _close(found)

    def _send_held(self) -> None:
        for packet in self._held:
            try:
                socket.send_fds(self._socket, [packet.data], packet.fds)
            except OSError as error:
                log.warning("the nursery does not listen: %s", error)  # its end comes as news
        _close(self._held)
        self._held = []


def _close(packets: Sequence[_Packet]) -> None:
    for packet in packets:
        for fd in packet.fds:
            os.close(fd)
