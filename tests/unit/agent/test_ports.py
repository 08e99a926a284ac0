"""`--port-range`: at which ports other nodes find this one."""

from __future__ import annotations

import contextlib
import socket
import socketserver
from collections.abc import Iterator

import pytest

from zero_agent.node.memory import MemoryServer
from zero_agent.node.network import PatientServer, first_free
from zero_agent.node.ring import Ring

HOST = "127.0.0.1"


@contextlib.contextmanager
def taken(ports: range) -> Iterator[None]:
    """Somebody listens at all of these ports."""
    with contextlib.ExitStack() as held:
        for port in ports:
            with contextlib.suppress(OSError):  # somebody else does
                held.enter_context(socket.create_server((HOST, port)))
        yield


def test_the_ring_and_the_memory_listen_at_ports_of_the_range_that_are_free(tmp_path):
    ports = range(31_000, 31_040)  # below those that the kernel gives away
    with taken(ports[:10]), contextlib.ExitStack() as made:
        ring = made.enter_context(contextlib.closing(Ring(HOST, lambda *_: None, ports)))
        memory = MemoryServer(tmp_path, HOST, "key", budget_bytes=1, ports=ports)
        made.enter_context(contextlib.closing(memory))
        found = [int(one.address.rpartition(":")[2]) for one in (ring, memory)]
        assert set(found) <= set(ports[10:])
        assert len(set(found)) == 2


def test_a_range_without_a_free_port_is_named():
    ports = range(31_040, 31_044)
    with taken(ports), pytest.raises(OSError, match="31040 to 31043 are taken; name more with"):
        first_free(ports, lambda port: socket.create_server((HOST, port)))


def test_a_server_that_is_closed_before_its_thread_begins_ends_without_a_word():
    server = PatientServer((HOST, 0), socketserver.BaseRequestHandler)
    server.server_close()
    assert server.serve_forever() is None
