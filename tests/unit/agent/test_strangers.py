"""Whoever connects to a port of an agent gets nothing of use, and breaks nothing."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from zero_agent.node.health_endpoint import STARTING, Health
from zero_agent.node.memory import MemoryServer
from zero_agent.node.ring import Ring
from zero_contract import handshake, peer_memory
from zero_contract.handshake import NONCE_BYTES
from zero_contract.signing import PROOF_BYTES, Key, Purpose, Secret, derive
from zero_orchestrator.membership.job_state import Node

SECRET = Secret("the job's secret")
KEYS = {"ring": derive(SECRET, Purpose.RING), "memory": derive(SECRET, Purpose.PEER_MEMORY)}
"""By wire; each begins with a nonce, and says nothing else to strangers."""
FILE = "0123456789abcdef/step-000000007.g2.ab12/r00001.safetensors"


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
    ring.start(me, KEYS["ring"])
    directory = tmp_path_factory.mktemp("memory")
    memory = MemoryServer(directory, "127.0.0.1", KEYS["memory"], budget_bytes=10_000)
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
@pytest.mark.parametrize("port", KEYS)
def test_a_stranger_hears_a_nonce_and_is_hung_up_on_while_the_job_is_served(ports, port, said):
    assert len(answer(ports[port], SAID[said])) <= NONCE_BYTES
    with contextlib.closing(peer_memory.dial(ports["memory"], KEYS["memory"])) as member:
        member.send(peer_memory.Get(path=FILE, offset=0, length=1))
        assert not member.receive_reply().ok


# ---- a stranger who listens where a process of the job connects ----


@pytest.fixture
def dialled():
    """Returns what a process of the job says to a stranger who says something to it first."""

    def dial(wire: str, said: bytes) -> bytes:
        with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            ring = Ring("127.0.0.1", lambda *verdict: None)
            me = Node(id="a", incarnation="1", address="127.0.0.1", slots=1, ring=address)
            ring.start(me, KEYS["ring"])
            work = {
                "ring": lambda: ring.dial(me),
                "memory": lambda: peer_memory.dial(address, KEYS["memory"]),
            }
            job = threads.submit(work[wire])
            heard = b""
            with listener.accept()[0] as connection:
                connection.settimeout(20)
                connection.sendall(said)
                connection.shutdown(socket.SHUT_WR)
                while data := connection.recv(65536):
                    heard += data
            with pytest.raises(ConnectionError):
                job.result(20)
            ring.close()
        return heard

    return dial


PURPOSES = [text.encode() for each in Purpose for text in (each.value, each.name)]


@pytest.mark.parametrize("wire", KEYS)
def test_what_a_process_signs_for_a_stranger_opens_nothing(ports, dialled, wire):
    """The stranger chooses the nonce: the name of a purpose, or what once was one."""
    for chosen in (b"zero-ram\n", *PURPOSES, b"client", b"server"):
        said = chosen[:NONCE_BYTES].ljust(NONCE_BYTES, b"\0")
        heard = dialled(wire, said)
        keys = {heard[at : at + 32].hex() for at in range(len(heard) - 31)}
        keys |= {text.decode() for text in re.findall(rb"[0-9a-f]{64}", heard)}
        assert len(heard) == NONCE_BYTES + PROOF_BYTES
        assert keys.isdisjoint({SECRET, *KEYS.values()})
        key = Key(heard[NONCE_BYTES:].hex())
        for port in KEYS:
            with pytest.raises(ConnectionError), closing(connect(ports[port])) as connection:
                handshake.greet(connection, key)


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


@pytest.mark.parametrize("there", KEYS)
@pytest.mark.parametrize("here", KEYS)
def test_a_proof_for_one_wire_or_role_is_none_for_another(ports, here, there):
    """A stranger passes the nonce of one wire on to a client of another, and its proof back."""
    near, far = socket.socketpair()
    with near, far, closing(connect(ports[there])) as server, ThreadPoolExecutor(1) as threads:
        job = threads.submit(handshake.greet, near, KEYS[here])
        nonce = handshake.receive(server, NONCE_BYTES)
        far.sendall(nonce)
        answered = handshake.receive(far, NONCE_BYTES + PROOF_BYTES)
        if here != there:
            server.sendall(answered)
            assert server.recv(100) == b""
        # Back to the client that has made it: no proof of a server.
        far.sendall(b"\0\0" + answered[NONCE_BYTES:])
        with pytest.raises(handshake.StrangerError):
            job.result(20)


def test_whoever_passes_a_handshake_on_can_ask_for_nothing(ports):
    """On the path between two processes of the job, or at an address that one of them had."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        job = threads.submit(peer_memory.dial, address, KEYS["memory"])
        with listener.accept()[0] as client, closing(connect(ports["memory"])) as server:
            client.sendall(handshake.receive(server, NONCE_BYTES))
            server.sendall(handshake.receive(client, NONCE_BYTES + PROOF_BYTES))
            client.sendall(handshake.receive(server, 2 + PROOF_BYTES))
            with closing(job.result(20)) as member:
                member.send(peer_memory.Get(path=FILE, offset=0, length=1))
                asked = client.recv(65536)
                forged = asked.replace(b'"length": 1', b'"length": 2')
                assert forged != asked
                server.sendall(forged)
                assert server.recv(100) == b""


@pytest.mark.parametrize("said", SAID)
def test_who_talks_nonsense_to_the_health_port_leaves_it_answering(ports, said):
    heard = answer(ports["health"], SAID[said])
    assert SECRET.encode() not in heard
    connection = http.client.HTTPConnection(ports["health"], timeout=20)
    connection.request("GET", "/healthz")
    reply = connection.getresponse()
    assert (reply.status, SECRET.encode() in reply.read()) == (200, False)
    connection.close()
