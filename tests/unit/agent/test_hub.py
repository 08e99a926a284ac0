"""The hub: one that ends in any order of its thread and the agent's, and never goes deaf."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import queue
import socket
import socketserver
import threading
import time

import pytest

from tests.support.descriptors import no_descriptors
from tests.support.waiting import wait_for
from zero_agent.node.network import PatientServer
from zero_contract.channel import Channel
from zero_contract.hub import FIRST_PAUSE_S, Hub
from zero_contract.worker import Hello, Message, decode, encode


class HubFirst:
    """A lock after whose release by the agent's thread the hub's has run to its end."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if threading.current_thread() is not self._hub._thread:
            with contextlib.suppress(OSError):
                os.write(self._hub._wake_write, b".")  # an event of a moment before
            self._hub._thread.join(10)


def test_a_hub_that_has_ended_before_close_returns_is_no_error():
    hub = Hub()
    hub._lock = HubFirst(hub)
    hub.close()
    assert not hub._thread.is_alive()


def readable() -> int:
    """A descriptor with something to read, for ever."""
    reader, writer = os.pipe()
    os.write(writer, b".")
    os.close(writer)
    return reader


def test_a_callback_that_raises_is_called_again_after_a_pause_and_watched_for_ever():
    fd, calls = readable(), []

    def fail_at_first() -> None:
        calls.append(time.monotonic())
        if len(calls) < 4:
            raise OSError(errno.EMFILE, "Too many open files")
        hub.remove(fd, lambda: os.close(fd))

    hub = Hub()
    hub.add(fd, fail_at_first)
    wait_for(lambda: len(calls) == 4, 60, "the callback to be called again")
    pauses = [after - before for before, after in itertools.pairwise(calls)]
    expected = [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert all(took >= pause for took, pause in zip(pauses, expected, strict=True)), pauses
    hub.close()


def test_a_callback_that_pauses_and_raises_is_called_again():
    hub, fd, calls = Hub(), readable(), []

    def pauses_and_raises() -> None:
        calls.append(time.monotonic())
        hub.pause(fd, 0.01)
        raise ValueError("behind the pause")

    hub.add(fd, pauses_and_raises)
    wait_for(lambda: len(calls) == 3, 20, "three calls")
    hub.close()


def test_what_fails_on_the_hubs_thread_keeps_it_from_nothing_else(caplog):
    hub, heard = Hub(), threading.Event()
    hub.add(1 << 20, lambda: None)  # no descriptor
    hub.remove(-1, lambda: os.close(-1))
    fd = readable()
    hub.add(fd, heard.set)
    assert heard.wait(60)
    hub.remove(fd, lambda: os.close(fd))
    hub.close()
    assert caplog.text.count("internal error in the thread that reads") == 2


def test_a_worker_that_comes_when_there_are_no_descriptors_is_heard_when_there_are(tmp_path):
    hub, heard = Hub(), []
    channel = Channel(hub, tmp_path / "sock", lambda rank, message: heard.append((rank, message)))
    log = logging.getLogger("zero")
    said = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: said.set()  # type: ignore[method-assign]
    log.addHandler(handler)
    hello = Hello(rank=3, pid=1, can=())
    with socket.socket(socket.AF_UNIX) as worker:
        with no_descriptors():
            worker.connect(channel.path)
            worker.sendall(encode(hello))
            assert said.wait(60), "it is said why"
        wait_for(lambda: heard, 60, "the worker")
    assert heard == [(3, hello)]
    log.removeHandler(handler)
    channel.close()
    hub.close()


class Answer(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.sendall(b"here")


class Counting(PatientServer):
    tries = 0

    def get_request(self):
        self.tries += 1
        return super().get_request()


def test_the_connection_that_a_worker_has_made_last_gets_its_replies_whichever_is_heard_first(
    tmp_path,
):
    heard: queue.Queue[tuple[int, Message]] = queue.Queue()
    hub = Hub()
    channel = Channel(hub, tmp_path / "agent.sock", lambda *message: heard.put(message))
    hello = Hello(rank=3, pid=1, round=7)
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as last:
        first.connect(channel.path)
        last.connect(channel.path)
        for connection in (last, first):
            connection.sendall(encode(hello))
            assert heard.get(timeout=60) == (3, hello)
        channel.send(3, Hello(rank=0, pid=0))
        last.settimeout(60)
        assert decode(last.makefile("rb").readline()) == Hello(rank=0, pid=0)
    channel.close()
    hub.close()


def test_a_worker_that_gets_the_descriptor_of_one_that_is_hung_up_on_is_heard(
    tmp_path, monkeypatch
):
    """The agent's thread hangs up while the hub's hears that the worker has ended."""
    heard: queue.Queue[tuple[int, Message]] = queue.Queue()
    hub = Hub()
    channel = Channel(hub, tmp_path / "agent.sock", lambda *message: heard.put(message))
    first, second = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    first.connect(channel.path)
    first.sendall(encode(Hello(rank=0, pid=1)))
    heard.get(timeout=60)
    peer = channel._peers[0]
    descriptor, remove = peer._connection.fileno(), hub.remove

    def remove_later(*what: object) -> None:
        if threading.current_thread() is not hub._thread:
            first.shutdown(socket.SHUT_RDWR)
            wait_for(lambda: peer._connection.fileno() < 0, 60, "its end is heard")
            second.connect(channel.path)
            second.sendall(encode(Hello(rank=1, pid=2)))
            heard.get(timeout=60)
            assert channel._peers[1]._connection.fileno() == descriptor
        remove(*what)

    monkeypatch.setattr(hub, "remove", remove_later)
    peer.close()
    monkeypatch.undo()
    second.sendall(encode(Hello(rank=2, pid=2)))
    assert heard.get(timeout=60) == (2, Hello(rank=2, pid=2))
    channel.close()
    hub.close()
    first.close()
    second.close()


def test_a_call_behind_the_end_of_a_hub_writes_to_no_file_of_another():
    hub, closed = Hub(), threading.Event()
    number = hub._wake_write
    hub.close()
    reader, writer = os.pipe()
    os.dup2(writer, number)
    hub.remove(reader, closed.set)
    os.set_blocking(reader, False)
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)
    assert closed.is_set()
    for each in {reader, writer, number}:
        os.close(each)


def test_a_server_without_descriptors_answers_later_and_is_not_busy_meanwhile():
    with Counting(("127.0.0.1", 0), Answer) as server, socket.socket() as client:
        client.settimeout(60)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        with no_descriptors():
            began = time.monotonic()  # before the first try
            client.connect(server.server_address)
            wait_for(lambda: server.tries >= 3, 60, "the server to try again")
            assert time.monotonic() - began >= 2 * server.exhausted_pause_s
        assert client.recv(4) == b"here"
        server.shutdown()
