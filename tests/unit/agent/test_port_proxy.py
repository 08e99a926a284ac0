"""One port for etcd and for the workers' store."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from zero_agent.etcd.port_proxy import PortProxy

HOST = "127.0.0.1"


@contextlib.contextmanager
def server(name: str) -> Iterator[int]:
    """Answers each caller, when he has said all, with its name and what he has said; its port."""
    with socket.create_server((HOST, 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=answer, args=[connection], daemon=True).start()

        def answer(connection: socket.socket) -> None:
            with connection, connection.makefile("rb") as heard:
                connection.sendall(name.encode() + heard.read())

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy() -> Iterator[PortProxy]:
    with server("etcd ") as etcd, socket.create_server((HOST, 0)) as listener:
        where = f"{HOST}:{listener.getsockname()[1]}"
        with contextlib.closing(PortProxy(where, [listener], f"{HOST}:{etcd}")) as opened:
            yield opened


def say(proxy: PortProxy, text: bytes) -> bytes:
    host, _, port = proxy.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=120) as caller:
        caller.sendall(text)
        caller.shutdown(socket.SHUT_WR)
        with caller.makefile("rb") as answer:
            return answer.read()


def test_each_caller_reaches_etcd_or_the_newest_rounds_store_by_how_he_begins(proxy):
    long = b"\0" * 3_000_000
    assert say(proxy, b"\0x") == b"", "there is no store yet"
    with server("one ") as one, server("two ") as two:
        assert proxy.show_store(one) == proxy.address
        assert say(proxy, b"\0x") == b"one \0x"
        assert proxy.show_store(two) == proxy.address
        assert say(proxy, long) == b"two " + long
        assert say(proxy, b"PRI *") == b"etcd PRI *"
        assert say(proxy, b"\x16\x03\x01") == b"etcd \x16\x03\x01", "TLS"
    assert say(proxy, b"\0x") == b"", "that store has ended"


def test_who_connects_and_says_nothing_holds_up_nobody(proxy):
    host, _, port = proxy.address.rpartition(":")
    with contextlib.ExitStack() as silent:
        for _ in range(50):
            silent.enter_context(socket.create_connection((host, int(port)), timeout=120))
        assert say(proxy, b"GET /") == b"etcd GET /"


def test_its_end_ends_the_conversations_under_way_without_a_word(caplog):
    with server("etcd ") as etcd, socket.create_server((HOST, 0)) as listener:
        where = listener.getsockname()
        proxy = PortProxy(f"{HOST}:{where[1]}", [listener], f"{HOST}:{etcd}")
        with socket.create_connection(where, timeout=120) as caller:
            caller.sendall(b"PRI")
            with socket.create_connection(where, timeout=120):
                assert say(proxy, b"GET") == b"etcd GET"
                proxy.close()
            assert caller.recv(1) == b""
    assert caplog.records == []
