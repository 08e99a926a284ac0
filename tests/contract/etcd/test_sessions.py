"""One slow call costs nobody else's connection; a password is checked once; one long stream."""

from __future__ import annotations

import contextlib
import http.client
import re
import threading
import time
from pathlib import Path

import pytest

from tests.contract.etcd.client import ROOT, connect, put
from tests.support.etcd_server import EtcdServer, cluster
from tests.support.waiting import wait_for
from tests.support.watching import Seen
from zero_orchestrator.errors import StoreUnavailable
from zero_orchestrator.store.etcd.client import Credentials, EtcdStore
from zero_orchestrator.store.etcd.connection import NoAnswer
from zero_orchestrator.store.lease import LeaseKeeper

pytestmark = pytest.mark.etcd

WHO = Credentials(user="root", password="secret")


def calls(etcd: EtcdServer, method: str) -> int:
    """How many calls, or streams, of this method the server has begun."""
    connection = http.client.HTTPConnection(etcd.endpoint, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    found = re.findall(
        rf'^grpc_server_started_total{{grpc_method="{method}",.*}} (\d+)', text, re.M
    )
    return sum(map(int, found))


@pytest.fixture
def locked(own: EtcdServer) -> EtcdServer:
    """A server with users."""
    own.call("auth/user/add", name="root", password="secret")
    own.call("auth/role/add", name="root")
    own.call("auth/user/grant", user="root", role="root")
    own.call("auth/enable")
    return own


def test_a_call_that_is_slow_beside_others_that_are_answered_keeps_the_connection(own):
    with connect(own.endpoint) as store:
        store.get(f"{ROOT}a")
        session = store._connection.session
        answered = threading.Event()

        def slow(etcd):
            """As an answer that takes longer than the call may, while others are answered."""
            began = time.monotonic()
            wait_for(lambda: _answers(store) and time.monotonic() - began > 1.2, 60, "time to pass")
            answered.set()
            raise NoAnswer

        with pytest.raises(StoreUnavailable, match="in time"):
            store._connection.call(slow, timeout_s=1.5)
        assert answered.is_set()
        assert store._connection.session is session


def test_a_keep_alive_without_an_answer_gives_up_its_own_connection_alone(own):
    seen, silences = Seen(), []
    with connect(own.endpoint) as store:
        store.watch(ROOT, seen, after=0)
        put(store, f"{ROOT}a", "1")
        session = store._connection.session
        keeper = LeaseKeeper(store, 3, on_lost=lambda _: None, on_silent=silences.append)
        with own.suspended():
            wait_for(lambda: silences, 60, "the keeper to notice")
        put(store, f"{ROOT}b", "2")
        assert store._connection.session is session
        wait_for(lambda: seen.values == ["1", "2"], 60, "the watch")
        keeper.close()


def test_a_password_is_checked_once_however_many_connections_and_threads_there_are(locked):
    with (
        connect(locked.endpoint, credentials=WHO) as store,
        contextlib.closing(store.sibling()) as sibling,
    ):
        threads = [
            threading.Thread(target=one.get, args=(f"{ROOT}a",))
            for one in (store, sibling)
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store.keep_alive(store.grant(5))
        for _ in range(3):
            store._connection.give_up(store._connection.session)
            store.get(f"{ROOT}a")
        assert calls(locked, "Authenticate") == 1


def test_keep_alives_of_all_leases_travel_on_one_stream(own):
    with connect(own.endpoint) as store:
        leases = [store.grant(5), store.grant(7)]
        assert [store.keep_alive(lease) for lease in 3 * leases] == 3 * [5.0, 7.0]
        assert calls(own, "LeaseKeepAlive") == 1


def test_a_read_at_a_stopped_member_is_answered_by_another_within_its_time(
    tmp_path: Path, binary: Path
) -> None:
    with cluster(tmp_path, binary=binary) as members:
        everybody = ",".join(member.endpoint for member in members)
        followers = {m.endpoint: m for m in members if not _leads(m)}
        with contextlib.closing(_store_at(everybody, set(followers))) as store:
            used = followers[store.endpoint]
            with used.suspended():
                assert store.get(f"{ROOT}a") is None
                assert store.endpoint != used.endpoint


def _leads(member: EtcdServer) -> bool:
    status = member.call("maintenance/status")
    return status["leader"] == status["header"]["member_id"]  # type: ignore[index]


def _store_at(endpoints: str, wanted: set[str]) -> EtcdStore:
    """A store that has begun at one of the wanted endpoints."""
    while True:
        store = EtcdStore(endpoints, timeout_s=6.0)
        if store.endpoint in wanted:
            return store
        store.close()


def _answers(store: EtcdStore) -> bool:
    with contextlib.suppress(StoreUnavailable):
        store.get(f"{ROOT}a")
        return True
    return False
