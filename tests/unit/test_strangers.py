"""Whoever connects to a port of an agent gets nothing of use, and breaks nothing."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl

import pytest

from zero_agent.node.health_endpoint import STARTING, Health
from zero_agent.node.memory_server import MemoryServer
from zero_agent.node.ring import Ring
from zero_contract import peer_memory
from zero_orchestrator.membership.job_state import Node

SECRET = "the job's secret"
GREETINGS = {"ring": 33, "memory": 16}
"""Bytes of the nonce with which these begin; nothing else is for strangers."""


def client_hello() -> bytes:
    context, sent = ssl.create_default_context(), ssl.MemoryBIO()
    connection = context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="node")
    with contextlib.suppress(ssl.SSLWantReadError):
        connection.do_handshake()
    return sent.read()


SAID = {
    "nothing": b"",
    "noise": os.urandom(2000),
    "HTTP": b"GET / HTTP/1.1\r\nHost: node\r\n\r\n",
    "TLS": client_hello(),
    "a line without end": b"a" * 100_000,
    "a wrong proof": b"0" * 64 + b" " + b"0" * 32 + b"\n",
    "a length without end": b"\xff" * 48,
}


@pytest.fixture(scope="module")
def ports(tmp_path_factory):
    """What an agent opens on its node's address, by name; nothing of it is ever restarted."""
    me = Node(id="a", incarnation="1", address="127.0.0.1", slots=1, ring="")
    ring = Ring("127.0.0.1", lambda *verdict: None)
    ring.start(me, SECRET)
    directory = tmp_path_factory.mktemp("memory")
    memory = MemoryServer(directory, "127.0.0.1", peer_memory.key_of(SECRET), budget_bytes=10_000)
    health = Health("127.0.0.1", 0)
    health.watch(lambda: STARTING)
    yield {"ring": ring.address, "memory": memory.address, "health": f"127.0.0.1:{health.port}"}
    assert list(directory.rglob("*")) == []
    for one in (ring, memory, health):
        one.close()


def answer(address: str, said: bytes) -> bytes:
    """All that is said to a stranger before it is hung up on."""
    host, _, port = address.rpartition(":")
    heard = b""
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        with contextlib.suppress(OSError):  # hung up on in mid-sentence
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while data := connection.recv(65536):
                heard += data
    return heard


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("port", GREETINGS)
def test_a_stranger_hears_a_nonce_and_is_hung_up_on_while_the_job_is_served(ports, port, said):
    assert len(answer(ports[port], SAID[said])) <= GREETINGS[port]
    with contextlib.closing(
        peer_memory.dial(ports["memory"], peer_memory.key_of(SECRET))
    ) as member:
        missing = "0123456789abcdef/step-000000007.g2.ab12/r00001.safetensors"
        peer_memory.send(member, peer_memory.Get(path=missing, offset=0, length=1))
        assert not peer_memory.receive_reply(member).ok


@pytest.mark.parametrize("said", SAID)
def test_who_talks_nonsense_to_the_health_port_leaves_it_answering(ports, said):
    heard = answer(ports["health"], SAID[said])
    assert SECRET.encode() not in heard
    connection = http.client.HTTPConnection(ports["health"], timeout=20)
    connection.request("GET", "/healthz")
    reply = connection.getresponse()
    assert (reply.status, SECRET.encode() in reply.read()) == (200, False)
    connection.close()
