"""A member of the job's own etcd, as its agent begins it and keeps it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.suspended import suspend
from tests.support.waiting import wait_for
from zero_agent.etcd import own_etcd, own_members, signs
from zero_agent.etcd.etcd_access import Access, Joining
from zero_agent.etcd.etcd_process import is_healthy
from zero_agent.etcd.own_etcd import Seat, own_server
from zero_agent.etcd.own_members import MemberKeeper
from zero_agent.node.network import ANY_PORT
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.store.succession import Heir

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


@pytest.mark.full
def test_a_keeper_that_is_closed_while_its_store_is_silent_leaves_the_next_server_alone(
    monkeypatch,
):
    """The one that its node begins then, in the place of the silent one."""
    monkeypatch.setattr(own_members, "END_S", 6.0)
    endpoint = f"127.0.0.1:{free_port()}"
    with own(endpoint) as seat, Access(endpoints=endpoint).store() as store:
        keeper = MemberKeeper(seat, store.sibling(), "a")
        keeper.serve("job", "127.0.0.1", "127.0.0.1", lambda text: None)
        wait_for(lambda: keeper._looked_s, 30, "a look")
        looked_s = keeper._looked_s
        suspend(seat.process.pid)
        wait_for(lambda: time.monotonic() - looked_s > own_members.LOOK_S, 30, "a turn in silence")
        keeper.close()
        assert not keeper._thread.is_alive()


# ---- a store in the place of one that is lost ----

ANEW = """
import os, signal, sys
from zero_agent.etcd import own_etcd, signs
from zero_agent.etcd.etcd_access import Access, Joining
from zero_agent.node.network import ANY_PORT
from zero_orchestrator.store.succession import Heir

endpoint, root, when = sys.argv[1:]

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def write(which):
    with Access(endpoints=seat.member.endpoint).store() as store:
        store.put("/which", which)

seen = {"job": "job", "node": "a", "ports": ANY_PORT, "keep_s": 600.0}
with own_etcd.own_server([endpoint], Joining(), **seen) as seat:
    write("old")
    seat.note("0", root)
    with seat.beginning_anew("a", "127.0.0.1", "127.0.0.1") as member:
        write("new")
        if when == "before the file":
            die()
        assert signs.claim(root, "0", Heir(store="1", endpoint=member.reached, node="a"))
        if when == "after the file":
            die()
        setattr(*{"within": (own_etcd.shutil, "rmtree"), "noted": (seat, "note")}[when], die)
        seat.follow(member.reached, "1")
"""


@pytest.mark.parametrize(
    ("when", "which"),
    [("before the file", "old"), ("after the file", "new"), ("within", "new"), ("noted", "new")],
)
@pytest.mark.corners(when=["before the file", "after the file"])
def test_an_agent_that_is_killed_while_it_begins_a_store_serves_it_again_if_it_was_the_first(
    tmp_path, when, which
):
    (root := tmp_path / "root").mkdir()
    endpoint = f"127.0.0.1:{free_port()}"
    died = subprocess.run([sys.executable, "-c", ANEW, endpoint, str(root), when], check=False)
    assert died.returncode == -signal.SIGKILL
    for _ in range(2):
        with own(endpoint) as seat:
            seat.process.wait_healthy()
            with Access(endpoints=seat.member.endpoint).store() as store:
                assert store.get("/which").value == which
            assert seat.store == ("1" if which == "new" else "0")


def test_what_is_left_of_a_store_before_the_last_does_not_hinder_the_next(tmp_path):
    with own(f"127.0.0.1:{free_port()}") as seat:
        left = seat.directory / "before" / "data"
        left.mkdir(parents=True)
        (left / "rest").touch()
        with seat.beginning_anew("a", "127.0.0.1", "127.0.0.1") as member:
            assert is_healthy(member.endpoint)
            seat.follow(member.reached, "1")
        assert is_healthy(member.endpoint)


@pytest.fixture
def been_here(tmp_path, monkeypatch) -> tuple[str, str]:
    """The endpoint of a node whose data are gone, and where it knows the checkpoints to be."""
    for module in (own_etcd, signs):
        monkeypatch.setattr(module, "WATCH_S", 3.0)
    (root := tmp_path / "root").mkdir()
    endpoint = f"127.0.0.1:{free_port()}"
    with own(endpoint) as seat:
        seat.note("0", str(root))
        seat.wipe()
    return endpoint, str(root)


@contextlib.contextmanager
def alive(root: str, store: str, *endpoints: str) -> Iterator[None]:
    """Somewhere a store shows that it lives."""
    ended = threading.Event()

    def show() -> None:
        while not ended.wait(0.2):
            signs.show_life(root, store, endpoints)

    (shows := threading.Thread(target=show)).start()
    try:
        yield
    finally:
        ended.set()
        shows.join()


@pytest.mark.parametrize("has_heir", [False, True])
def test_a_first_node_that_does_not_reach_the_store_begins_no_second_one(been_here, has_heir):
    endpoint, root = been_here
    nowhere = "127.0.0.1:9"
    if has_heir:
        assert signs.claim(root, "0", Heir(store="1", endpoint=nowhere, node="b"))
    with alive(root, "1" if has_heir else "0", nowhere):
        for _ in range(2):
            with own(endpoint) as seat:
                assert (seat.member, seat.known[0]) == (None, nowhere)
    with own(endpoint) as seat:
        assert seat.member is not None, "nobody serves it any more: the job begins again"


def test_a_first_node_finds_the_store_where_it_never_was_while_that_node_was_there(been_here):
    endpoint, root = been_here
    elsewhere = f"127.0.0.1:{free_port()}"
    with (
        own_server([elsewhere], Joining(), job="o", node="o", ports=ANY_PORT, keep_s=1.0) as other,
        alive(root, "0", elsewhere),
        own(endpoint) as seat,
    ):
        assert other.member is not None
        assert seat.member is None
        assert seat.found() == [elsewhere]
