"""What the store promises with several endpoints, and where nobody answers."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.contract.etcd.client import HANGS_S, ROOT, connect, member_at, put
from tests.support.etcd_server import EtcdServer, cluster
from tests.support.ports import free_port
from tests.support.waiting import wait_for
from tests.support.watching import SOON_S, Seen
from zero_orchestrator.errors import StoreUnavailable

pytestmark = pytest.mark.etcd


def test_calls_and_watches_go_on_when_the_member_they_use_is_killed(
    tmp_path: Path, binary: Path
) -> None:
    seen = Seen()
    with cluster(tmp_path, binary=binary) as members:
        everybody = ",".join(member.endpoint for member in members)
        with connect(everybody) as store:
            store.watch(ROOT, seen, after=0)
            lost = store.endpoint
            put(store, f"{ROOT}a", "before")
            seen.wait_value("before")
            member_at(members, lost).kill()
            put(store, f"{ROOT}b", "after")
            assert store.endpoint != lost
            assert seen.wait_value("after") == ["before", "after"]


def test_one_dead_endpoint_of_two_is_not_noticed(own: EtcdServer) -> None:
    dead = f"127.0.0.1:{free_port()}"
    for _ in range(4):  # whichever of the two it starts at
        with connect(f"{dead},{own.endpoint}") as store:
            store.put(f"{ROOT}a", "1")
            assert store.endpoint == own.endpoint


def test_an_endpoint_may_be_a_name(own: EtcdServer) -> None:
    with connect(f"localhost:{own.member.client_port}") as store:
        store.put(f"{ROOT}a", "1")


def test_endpoints_where_nothing_listens_are_named_at_once() -> None:
    first, second = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    started = time.monotonic()
    with connect(f"{first},{second}") as store, pytest.raises(StoreUnavailable) as raised:
        store.put(f"{ROOT}a", "1")
    assert first in str(raised.value)
    assert second in str(raised.value)
    assert time.monotonic() - started < HANGS_S


def test_a_host_that_does_not_exist_is_named_in_time() -> None:
    with connect("no-such-host.invalid:2379") as store:
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"no-such-host\.invalid"):
            store.get(f"{ROOT}a")
        assert time.monotonic() - started < HANGS_S


@pytest.mark.full
def test_waiting_for_a_server_that_is_down_costs_no_processor_time(own: EtcdServer) -> None:
    with connect(own.endpoint) as store:
        seen = Seen()
        for _ in range(4):
            store.watch(ROOT, seen, after=0)
        put(store, f"{ROOT}a", "1")
        wait_for(lambda: len(seen.values) == 4, SOON_S, "four watches at work")
        own.kill()
        spent, started = time.process_time(), time.monotonic()
        threading.Event().wait(3.0)  # the measurement itself, not a wait for anything
        share = (time.process_time() - spent) / (time.monotonic() - started)
        assert share < 0.2  # a client that spins takes a whole core
