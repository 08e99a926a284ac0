"""The liveness ring over real sockets: who is declared dead, and who never is."""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.support.ports import free_port
from tests.support.waiting import wait_for
from zero_agent.node.ring import RETRY_S, Ring, neighbour
from zero_contract.handshake import NONCE_BYTES
from zero_contract.signing import PROOF_BYTES, Key, Purpose, Secret, derive
from zero_orchestrator.membership.job_state import Node

KEY = derive(Secret("the job's secret"), Purpose.RING)
HANDSHAKE_BYTES = NONCE_BYTES + (NONCE_BYTES + PROOF_BYTES) + (2 + len("b 1") + PROOF_BYTES)


def node(name: str, ring: str = "x:1", incarnation: str = "1") -> Node:
    return Node(id=name, incarnation=incarnation, address="127.0.0.1", slots=1, ring=ring)


@pytest.mark.parametrize(
    ("me", "live", "expected"),
    [("a", "abc", "b"), ("c", "abc", "a"), ("b", "ab", "a"), ("a", "a", None), ("b", "", None)],
)
def test_each_agent_watches_the_next_and_the_last_one_the_first(me, live, expected):
    watched = neighbour(node(me), [node(name) for name in live])
    assert (watched and watched.id) == expected


class Proxy:
    """A wire between two agents that can be cut while both live."""

    def __init__(self, target: str) -> None:
        host, port = target.split(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _RELAY,
                str(self._listener.fileno()),
                host,
                port,
                str(HANDSHAKE_BYTES),
            ],
            pass_fds=[self._listener.fileno()],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._listener.close()

    @property
    def connections(self) -> Iterator[str]:
        return iter(self.process.stdout.readline, "")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


_RELAY = """
import selectors, socket, sys
listener = socket.socket(fileno=int(sys.argv[1]))
first = True
while True:
    near, _ = listener.accept()
    print("connected", flush=True)
    far = socket.create_connection((sys.argv[2], int(sys.argv[3])))
    both = selectors.DefaultSelector()
    both.register(near, selectors.EVENT_READ, far)
    both.register(far, selectors.EVENT_READ, near)
    passed, open_ = 0, True
    while open_:
        for key, _ in both.select():
            data = key.fileobj.recv(4096)
            if not data:
                open_ = False
                break
            key.data.sendall(data)
            passed += len(data)
        if first and passed >= int(sys.argv[4]):  # the handshake is through: cut the wire, once
            first = open_ = False
    near.close(); far.close(); both.close()
"""


@pytest.fixture
def ring() -> Iterator[Callable[..., Ring]]:
    """Makes rings whose verdicts arrive in `ring.dead`."""
    made: list[Ring] = []

    def make(name: str, incarnation: str = "1", key: Key = KEY) -> Ring:
        dead: queue.SimpleQueue[tuple[Node, bool]] = queue.SimpleQueue()
        one = Ring("127.0.0.1", lambda node, certain: dead.put((node, certain)))
        one.dead = dead
        one.node = node(name, one.address, incarnation)
        one.start(one.node, key)
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


def watching(ring: Ring) -> bool:
    return ring._connection is not None


_AGENT = """
import sys, time
from zero_agent.node import identity
from zero_agent.node.ring import Ring
from zero_contract.handshake import NONCE_BYTES
from zero_contract.signing import PROOF_BYTES, Key, Purpose, Secret, derive
from zero_orchestrator.membership.job_state import Node
ring = Ring("127.0.0.1", print)
ring.start(Node(id="b", incarnation="1", address="127.0.0.1", slots=1), sys.argv[1])
print(ring.address, identity.own(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("here", [True, False], ids=["of this machine", "of another"])
def test_a_killed_agent_is_reported_once_and_for_certain_if_its_own_kernel_is_asked(ring, here):
    a = ring("a")
    command = [sys.executable, "-c", _AGENT, KEY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        address, process_name = process.stdout.readline().split()
        b = replace(node("b", address), process=process_name if here else "")
        a.follow(a.node, [a.node, b])
        wait_for(lambda: watching(a), 60, "the connection")
        process.kill()
        assert a.dead.get(timeout=120) == (b, here)
        with pytest.raises(queue.Empty):
            a.dead.get(timeout=1.5 * RETRY_S)


def test_a_cut_connection_to_a_living_agent_is_no_verdict(ring):
    a, b = ring("a"), ring("b")
    wire = Proxy(b.address)
    try:
        a.follow(a.node, [a.node, replace(b.node, ring=wire.address)])
        seen = wire.connections
        assert [next(seen) for _ in range(2)] == ["connected\n"] * 2  # cut, and held again
        wait_for(lambda: watching(a), 60, "the connection")
        assert a.dead.empty()
    finally:
        wire.kill()


def test_a_living_agent_whose_port_refuses_after_a_cut_is_suspected_and_no_more(ring):
    """A proxy that restarts; a firewall that rejects with a reset looks the same."""
    a, b = ring("a"), ring("b")
    wire = Proxy(b.address)
    try:
        there = replace(b.node, ring=wire.address)
        a.follow(a.node, [a.node, there])
        assert [next(wire.connections) for _ in range(2)] == ["connected\n"] * 2
        wait_for(lambda: watching(a), 60, "the connection")
    finally:
        wire.kill()
    assert a.dead.get(timeout=120) == (there, False)
    with pytest.raises(queue.Empty):
        a.dead.get(timeout=1.5 * RETRY_S)


def test_an_address_where_nobody_was_ever_met_is_no_verdict(ring):
    """A firewall that rejects connections must not make healthy nodes look dead."""
    a = ring("a")
    nobody = node("b", f"127.0.0.1:{free_port()}")
    a.follow(a.node, [a.node, nobody])
    with pytest.raises(queue.Empty):
        a.dead.get(timeout=0.5)


@pytest.mark.parametrize(("name", "certain"), [("b", True), ("c", False)])
def test_another_process_where_one_was_met_means_that_it_is_gone_if_it_is_the_nodes(
    ring, name, certain
):
    """That of another node may answer because a route has changed."""
    a, other = ring("a"), ring(name, incarnation="2")
    former = replace(other.node, id="b", incarnation="1")
    a._met = ("b", "1")
    a.follow(a.node, [a.node, former])
    assert a.dead.get(timeout=120) == (former, certain)


def test_a_process_that_dies_while_it_is_dialled_is_still_found_dead(ring):
    """The kernel may close the connection before the listener: the dial gets through, and ends."""
    a = ring("a")
    with socket.create_server(("127.0.0.1", 0)) as dying:
        b = node("b", f"127.0.0.1:{dying.getsockname()[1]}")
        a._met = ("b", "1")
        a.follow(a.node, [a.node, b])
        dying.accept()[0].close()
    assert a.dead.get(timeout=120) == (b, False)


def test_who_does_not_know_the_secret_is_neither_answered_nor_believed(ring):
    a, stranger = ring("a"), ring("b", key=derive(Secret("another secret"), Purpose.RING))
    a.follow(a.node, [a.node, stranger.node])
    with pytest.raises(queue.Empty):
        a.dead.get(timeout=0.5)
    assert not watching(a)
    with pytest.raises(ConnectionError):
        a.dial(stranger.node)
