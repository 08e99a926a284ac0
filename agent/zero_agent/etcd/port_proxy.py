"""TCP proxy at `--master-port`, the one port of node 0 that firewalls open.

torchrun's workers find their TCPStore at that port. Here the agents meet there too, in etcd. So
this proxy listens at the port and forwards each connection by its first byte. Each round has a
TCPStore at another local port, to which the proxy then forwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Collection, Sequence

from zero_agent.etcd.etcd_process import LOOPBACK
from zero_orchestrator.addresses import host_port, split_host_port

FIRST_BYTE_S = 30.0  # a client that sends nothing costs a connection for so long
CONNECT_S = 5.0
_STORES = b"\0"
"""The first byte of a client of a TCPStore, and of none of HTTP or TLS: `VALIDATE` of torch's
`TCPStoreBackend.hpp`."""
_CHUNK_BYTES = 1 << 16


class PortProxy:
    """Forwards connections on a daemon thread until it is closed."""

    def __init__(self, address: str, listeners: Sequence[socket.socket], etcd: str) -> None:
        """Begin to forward from the listeners, which belong to this object from now on.

        There is no TCPStore yet. Other nodes reach the listeners by `address`; without an `etcd`,
        connections to it are closed.
        """
        self.address = address
        self._etcd, self._store = etcd, ""
        self._loop = asyncio.new_event_loop()
        # On this thread: whoever makes this object gets the error of a listener that cannot serve.
        serving = (asyncio.start_server(self._connected, sock=sock) for sock in listeners)
        self._loop.run_until_complete(_all(*serving))
        self._thread = threading.Thread(
            target=self._run, args=(listeners,), name="zero-proxy", daemon=True
        )
        self._thread.start()

    def show_store(self, port: int) -> str:
        """Forward workers to the TCPStore at a local port; returns the address for workers."""
        self._store = host_port(LOOPBACK, port)
        return self.address

    def close(self) -> None:
        """Stop listening and close all connections; may be called once."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self, listeners: Sequence[socket.socket]) -> None:
        (loop := self._loop).run_forever()
        for sock in listeners:
            sock.close()
        loop.run_until_complete(_hang_up(asyncio.all_tasks(loop)))
        loop.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = (OSError, TimeoutError, asyncio.CancelledError)
        with contextlib.suppress(*ends), contextlib.closing(writer):
            # Which of the two the client wants is only known once it has sent something.
            first = await asyncio.wait_for(reader.read(1), FIRST_BYTE_S)
            target = self._store if first == _STORES else self._etcd
            if not (first and target):
                return
            there = asyncio.open_connection(*split_host_port(target))
            their_reader, their_writer = await asyncio.wait_for(there, CONNECT_S)
            with contextlib.closing(their_writer):
                their_writer.write(first)
                await _all(_pump(reader, their_writer), _pump(their_reader, writer))


async def _hang_up(calls: Collection[asyncio.Task[None]]) -> None:
    # Awaited: asyncio prints each task that is destroyed before it has ended.
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def _all(*work: object) -> None:
    await asyncio.gather(*work)  # type: ignore[call-overload]


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy all bytes of one side, and its end, to the other side."""
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()  # a slow reader holds up its own connection alone
    writer.write_eof()
