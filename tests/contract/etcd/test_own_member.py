"""A member of the job's own etcd, as its agent begins it and keeps it."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.waiting import wait_for
from zero_agent.etcd import own_members
from zero_agent.etcd.etcd_access import Access, Joining
from zero_agent.etcd.etcd_process import is_healthy
from zero_agent.etcd.own_etcd import Seat, own_server
from zero_agent.etcd.own_members import MemberKeeper
from zero_agent.node.network import ANY_PORT
from zero_orchestrator.membership.keys import Keys

pytestmark = pytest.mark.etcd


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def own(endpoint: str, ports: range = ANY_PORT) -> contextlib.AbstractContextManager[Seat]:
    return own_server([endpoint], Joining(), job="job", node="a", ports=ports, keep_s=600.0)


def test_the_port_of_the_store_may_be_the_first_one_of_the_range():
    port = free_port()
    with own(f"127.0.0.1:{port}", range(port, port + 20)) as seat:
        assert seat.member.client_port == port
        assert port < seat.member.peer_port < port + 20
        assert is_healthy(seat.member.endpoint)


@contextlib.contextmanager
def kept() -> Iterator[tuple[Seat, str]]:
    """The only member of a store with its keeper, and its endpoint."""
    endpoint = f"127.0.0.1:{free_port()}"
    with (
        own(endpoint) as seat,
        Access(endpoints=endpoint).store() as store,
        contextlib.closing(MemberKeeper(seat, store.sibling(), "a")) as keeper,
    ):
        keeper.serve("job", "127.0.0.1", "127.0.0.1", lambda text: None)
        yield seat, endpoint


def kill(seat: Seat) -> None:
    process = seat.process
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(10.0)


def test_a_server_that_ends_again_and_again_is_started_again_while_the_store_needs_it(monkeypatch):
    monkeypatch.setattr(own_members, "_CRASHES", 0)
    with kept() as (seat, endpoint):
        for _ in range(3):
            kill(seat)
            wait_for(lambda: is_healthy(endpoint), 30, "the server, again")


def test_a_server_for_which_there_is_no_room_is_started_again_when_there_is(
    tmp_path, monkeypatch, caplog
):
    with kept() as (seat, endpoint):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no" / "room"))
        kill(seat)
        wait_for(lambda: "cannot be started again" in caplog.text, 30, "an attempt that fails")
        monkeypatch.undo()
        wait_for(lambda: is_healthy(endpoint), 30, "the server, again")


def test_a_node_whose_member_etcd_refuses_asks_once_in_a_look(tmp_path):
    endpoint, key = f"127.0.0.1:{free_port()}", Keys("job").store_part("invited")
    with own(endpoint), Access(endpoints=endpoint).store() as store:
        store.cluster.add_learner("http://127.0.0.1:9")  # one at a time
        seat = Seat(tmp_path, (endpoint,), Joining(), ANY_PORT)
        with contextlib.closing(MemberKeeper(seat, store.sibling(), "b")) as keeper:
            keeper.serve("job", "127.0.0.1", "127.0.0.1", lambda text: None)
            asked, began_s = store.put(key, "b"), time.monotonic()
            for _ in range(2):
                wait_for(lambda before=asked: store.get(key).mod_revision > before, 30, "one more")
                asked = store.get(key).mod_revision
        assert time.monotonic() - began_s > own_members.LOOK_S
