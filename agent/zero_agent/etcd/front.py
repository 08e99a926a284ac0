"""One port for all that other nodes look for on node 0: `--master-port`, which firewalls open.

torchrun's workers find their store there. Here the agents meet there too, in etcd, so this listens
at the port and passes each connection on by its first byte: a client of a TCPStore begins with a
zero, which neither HTTP nor TLS does. What is passed on is not looked at. Each round has a store on
a port of its own; the next round's takes its place here.

Must always hold: who says nothing, or whose target is gone, costs a connection and nothing else; a
slow reader holds up its own connection alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Collection, Sequence

from zero_agent.etcd.etcd_process import LOOPBACK
from zero_orchestrator.addresses import host_port, split_host_port

FIRST_BYTE_S = 30.0
CONNECT_S = 5.0
WAITING = 4096
"""So many workers may connect at once."""
_STORES = b"\0"
"""How a client of a TCPStore begins: `VALIDATE` of torch's `TCPStoreBackend.hpp`."""
_CHUNK_BYTES = 1 << 16


class Front:
    """Passes connections on until closed, on a thread of its own."""

    def __init__(self, address: str, listeners: Sequence[socket.socket], etcd: str) -> None:
        """Begin; there is no store yet.

        Args:
            address: Under which the other nodes know this port, `host:port`.
            listeners: Sockets that listen there; they belong to this object from now on.
            etcd: `host:port` of this node's etcd; empty: nobody meets there.
        """
        self.address = address
        self._etcd, self._store = etcd, ""
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(listeners, started), name="zero-front", daemon=True
        )
        self._thread.start()
        started.wait()

    def show_store(self, port: int) -> str:
        """From now on workers reach this machine's store at a port here; its address for them."""
        self._store = host_port(LOOPBACK, port)
        return self.address

    def close(self) -> None:
        """Stop listening and hang up; safe to call once."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self, listeners: Sequence[socket.socket], started: threading.Event) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        serving = (asyncio.start_server(self._connected, sock=sock) for sock in listeners)
        loop.run_until_complete(_all(*serving))
        started.set()
        loop.run_forever()
        for sock in listeners:
            sock.close()
        loop.run_until_complete(_hang_up(asyncio.all_tasks(loop)))
        loop.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = (OSError, TimeoutError, asyncio.CancelledError)
        with contextlib.suppress(*ends), contextlib.closing(writer):
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
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def _all(*work: object) -> None:
    await asyncio.gather(*work)  # type: ignore[call-overload]


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All that one side says, and its end, to the other."""
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
