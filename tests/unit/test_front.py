"""One port for etcd and for the workers' store."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from zero_agent.etcd.front import Front

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
def front() -> Iterator[Front]:
    with server("etcd ") as etcd, socket.create_server((HOST, 0)) as listener:
        where = f"{HOST}:{listener.getsockname()[1]}"
        with contextlib.closing(Front(where, [listener], f"{HOST}:{etcd}")) as opened:
            yield opened


def say(front: Front, text: bytes) -> bytes:
    host, _, port = front.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=120) as caller:
        caller.sendall(text)
        caller.shutdown(socket.SHUT_WR)
        with caller.makefile("rb") as answer:
            return answer.read()


def test_each_caller_reaches_etcd_or_the_newest_rounds_store_by_how_he_begins(front):
    long = b"\0" * 3_000_000
    assert say(front, b"\0x") == b"", "there is no store yet"
    with server("one ") as one, server("two ") as two:
        assert front.show_store(one) == front.address
        assert say(front, b"\0x") == b"one \0x"
        assert front.show_store(two) == front.address
        assert say(front, long) == b"two " + long
        assert say(front, b"PRI *") == b"etcd PRI *"
        assert say(front, b"\x16\x03\x01") == b"etcd \x16\x03\x01", "TLS"
    assert say(front, b"\0x") == b"", "that store has ended"


def test_who_connects_and_says_nothing_holds_up_nobody(front):
    host, _, port = front.address.rpartition(":")
    with contextlib.ExitStack() as silent:
        for _ in range(50):
            silent.enter_context(socket.create_connection((host, int(port)), timeout=120))
        assert say(front, b"GET /") == b"etcd GET /"


def test_its_end_ends_the_conversations_under_way_without_a_word(caplog):
    with server("etcd ") as etcd, socket.create_server((HOST, 0)) as listener:
        where = listener.getsockname()
        front = Front(f"{HOST}:{where[1]}", [listener], f"{HOST}:{etcd}")
        with socket.create_connection(where, timeout=120) as caller:
            caller.sendall(b"PRI")
            with socket.create_connection(where, timeout=120):
                assert say(front, b"GET") == b"etcd GET"
                front.close()
            assert caller.recv(1) == b""
    assert caplog.records == []
