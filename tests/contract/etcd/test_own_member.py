"""A member of the job's own etcd, as its agent begins it and keeps it."""

from __future__ import annotations

import contextlib
import os
import signal
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


def test_a_server_that_ends_again_and_again_is_started_again_while_the_store_needs_it(monkeypatch):
    monkeypatch.setattr(own_members, "_CRASHES", 0)
    endpoint = f"127.0.0.1:{free_port()}"
    with own(endpoint) as seat, Access(endpoints=endpoint).store() as store:
        keeper = MemberKeeper(seat, store.sibling(), "a")
        with contextlib.closing(keeper):
            keeper.serve("job", "127.0.0.1", "127.0.0.1", lambda text: None)
            for _ in range(3):
                os.kill(seat.process.pid, signal.SIGKILL)
                wait_for(lambda: not is_healthy(endpoint), 10, "the end of the server")
                wait_for(lambda: is_healthy(endpoint), 30, "the server, again")
