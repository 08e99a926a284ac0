"""The speed of the network between two agents: some round trips, and transfers of a bounded size.

The prober sends *frames* over a connection to the ring of another agent, after the handshake: eight
bytes of length, then so many bytes of nothing. The other end drops each frame and answers it with
one byte. A length of `_HOW_LONG` asks how long its thread has waited for a CPU; the answer is
seconds. A probe sends at most `MOST_BYTES`, and ends within `LIMIT_S`.
"""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path

PINGS = 20
FIRST_BYTES = 64 << 10
GROWTH = 4
LARGEST_BYTES = 4 << 20
TRIES = 3
"""The number of frames of the size that is measured."""
MOST_BYTES = (TRIES + 1) * LARGEST_BYTES
LONG_S = 0.03
"""A transfer of this length is measured, or one of so many round trips:"""
ROUND_TRIPS = 4
LIMIT_S = 8.0
FRAME_S = 8.0
"""The longest time that the other end waits for the rest of a frame."""

_LENGTH = struct.Struct("!Q")
_SECONDS = struct.Struct("!d")
_HOW_LONG = (1 << 64) - 1
_ANSWER = b"."
_HUNG_UP = "the other end hung up during a probe"
_NOTHING = bytes(LARGEST_BYTES)
_CHUNK_BYTES = 256 << 10


def serve(connection: socket.socket) -> None:
    """Answer the frames of a client, which may as well send none, until it hangs up.

    Raises:
        OSError: The connection has broken, or stands still in the middle of a frame.
    """
    chunk = memoryview(bytearray(_LENGTH.size))
    while True:
        connection.settimeout(None)
        head = connection.recv(_LENGTH.size, socket.MSG_WAITALL)
        if len(head) < _LENGTH.size:
            return
        (left,) = _LENGTH.unpack(head)
        if left == _HOW_LONG:
            connection.sendall(_SECONDS.pack(waited_for_cpu_s()))
            continue
        if left > LARGEST_BYTES:
            return
        connection.settimeout(FRAME_S)
        if left > len(chunk):
            chunk = memoryview(bytearray(_CHUNK_BYTES))
        while left:
            received = connection.recv_into(chunk, min(left, len(chunk)))
            if not received:
                return
            left -= received
        connection.sendall(_ANSWER)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The network towards another agent."""

    latency_s: float
    """The shortest round trip."""
    bytes_per_s: float
    cpu_wait: float
    """The part of the time in which a thread of either end waited for a CPU, 0 to 1."""


def measure(connection: socket.socket) -> Measured:
    """Measure the network towards the other end.

    Raises:
        OSError: The other end hung up, or `LIMIT_S` have passed.
    """
    until_s = time.monotonic() + LIMIT_S
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    begin_s, own_s = time.perf_counter(), waited_for_cpu_s()
    round_trip_s = min(_transfer(connection, 0, until_s) for _ in range(PINGS))
    # A short transfer would measure the round trip: frames grow until the size decides.
    size, long_s = FIRST_BYTES, max(LONG_S, ROUND_TRIPS * round_trip_s)
    while (sent_s := _transfer(connection, size, until_s)) < long_s and size < LARGEST_BYTES:
        size = min(size * GROWTH, LARGEST_BYTES)
    # The fastest counts: other load makes some transfers slower, and none faster.
    sent_s = min(sent_s, *(_transfer(connection, size, until_s) for _ in range(TRIES - 1)))
    took_s, own_s = time.perf_counter() - begin_s, waited_for_cpu_s() - own_s
    # Busy CPUs make every transfer slow, and the network seem so: both ends say how busy they were.
    connection.settimeout(max(until_s - time.monotonic(), 1e-3))
    connection.sendall(_LENGTH.pack(_HOW_LONG))
    # The other end's thread serves this connection alone.
    if len(answer := connection.recv(_SECONDS.size, socket.MSG_WAITALL)) < _SECONDS.size:
        raise ConnectionAbortedError(_HUNG_UP)
    waited_s = own_s + float(_SECONDS.unpack(answer)[0])
    return Measured(
        latency_s=round_trip_s,
        bytes_per_s=size / max(sent_s - round_trip_s, 1e-6),
        cpu_wait=min(waited_s / max(took_s, 1e-6), 1.0),
    )


def waited_for_cpu_s() -> float:
    """Seconds in which this thread was ready and did not run; 0 if the kernel does not count."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _transfer(connection: socket.socket, size: int, until_s: float) -> float:
    """The seconds from the first byte of a frame to its answer."""
    begin_s = time.perf_counter()
    connection.settimeout(max(until_s - time.monotonic(), 1e-3))
    connection.sendall(_LENGTH.pack(size) + _NOTHING[:size])
    connection.settimeout(max(until_s - time.monotonic(), 1e-3))
    if connection.recv(1) != _ANSWER:
        raise ConnectionAbortedError(_HUNG_UP)
    return time.perf_counter() - begin_s
