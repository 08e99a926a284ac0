"""A TCP proxy that can lose answers: what a network does when it fails at the wrong moment."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Proxy:
    """Forwards connections to one endpoint; `lose_answers` and `drop` act on those open then."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[tuple[socket.socket, socket.socket, threading.Event]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_answers(self) -> None:
        for _, _, muted in self._open:
            muted.set()

    def drop(self) -> None:
        while self._open:
            for end in self._open.pop()[:2]:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                muted = threading.Event()
                self._open.append((client, server, muted))
                for source, sink, mute in ((client, server, None), (server, client, muted)):
                    threading.Thread(target=_pump, args=(source, sink, mute), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket, muted: threading.Event | None) -> None:
    with source, contextlib.suppress(OSError):
        while data := source.recv(65536):
            if muted is None or not muted.is_set():
                sink.sendall(data)
        sink.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxy(target: str) -> Iterator[Proxy]:
    with contextlib.closing(Proxy(target)) as running:
        yield running
