"""What the store promises when etcd itself is in trouble; every fault is a real one."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.etcd_server import EtcdServer, cluster, server
from tests.support.proxy import proxy
from tests.support.waiting import wait_for
from zero_agent.etcd_process import Member, free_port
from zero_orchestrator import etcd_stream, retry
from zero_orchestrator.errors import StoreRefused, StoreUnavailable
from zero_orchestrator.etcd import Credentials, EtcdStore
from zero_orchestrator.kv import Change, KeyValueStore, Put, absent
from zero_orchestrator.lease import LeaseKeeper, LeaseState

pytestmark = pytest.mark.etcd

TIMEOUT_S = 2.0
SOON_S = 15.0
ROOT = "/zero/faults/"


@pytest.fixture
def own(tmp_path: Path) -> Iterator[EtcdServer]:
    """A server that the test may hurt."""
    with server(tmp_path) as etcd:
        yield etcd


def connect(endpoints: str, **options: object) -> contextlib.closing[EtcdStore]:
    return contextlib.closing(EtcdStore(endpoints, timeout_s=TIMEOUT_S, **options))  # type: ignore[arg-type]


def put(store: KeyValueStore, key: str, value: str) -> int:
    return retry.within(SOON_S)(store.put, key, value)


def member_at(members: list[EtcdServer], endpoint: str) -> EtcdServer:
    return next(member for member in members if member.endpoint == endpoint)


def leads(member: EtcdServer) -> bool:
    status = member.call("maintenance/status")
    return bool(status["leader"] == status["header"]["member_id"])  # type: ignore[index]


class Seen:
    """Remembers what a watch delivered."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.compacted: list[int] = []

    def __call__(self, changes: Sequence[Change]) -> None:
        self.changes += changes

    @property
    def values(self) -> list[str]:
        return [change.item.value for change in self.changes if change.item]

    def wait(self, value: str) -> list[str]:
        wait_for(lambda: value in self.values, SOON_S, f"the change to {value!r}")
        return self.values


# ---- servers that come back ----


def test_a_watch_goes_on_after_its_server_was_killed_and_started_again(
    own: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Seen()
    with connect(own.endpoint) as store, connect(own.endpoint) as other:
        store.watch(ROOT, seen, after=0)
        for value in ("0", "1"):
            put(other, f"{ROOT}a", value)
        seen.wait("1")
        own.kill()
        own.start()
        for value in ("2", "3"):
            put(other, f"{ROOT}a", value)
        assert seen.wait("3") == ["0", "1", "2", "3"]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_watch_sees_what_was_written_while_it_had_no_server(tmp_path: Path) -> None:
    """Two members stay up and are written to; the watcher knows the third one alone."""
    seen = Seen()
    with cluster(tmp_path) as members, connect(members[0].endpoint) as watcher:
        watcher.watch(ROOT, seen, after=0)
        with connect(members[1].endpoint) as writer:
            put(writer, f"{ROOT}a", "before")
            seen.wait("before")
            members[0].kill()
            for n in range(20):
                put(writer, f"{ROOT}a", f"during {n}")
            members[0].start()
            put(writer, f"{ROOT}a", "after")
        assert seen.wait("after") == ["before", *(f"during {n}" for n in range(20)), "after"]


def test_every_call_to_a_stopped_server_ends_in_time_and_works_when_it_goes_on(
    own: EtcdServer,
) -> None:
    with contextlib.closing(EtcdStore(own.endpoint, timeout_s=0.4)) as store:
        put(store, f"{ROOT}a", "1")
        lease = store.grant(60)
        calls: list[Callable[[], object]] = [
            lambda: store.get(f"{ROOT}a"),
            lambda: store.range(ROOT),
            lambda: store.put(f"{ROOT}b", "1"),
            lambda: store.delete(f"{ROOT}b"),
            lambda: store.txn([absent(f"{ROOT}b")], [Put(f"{ROOT}b", "1")]),
            lambda: store.grant(60),
            lambda: store.keep_alive(lease),
            lambda: store.revoke(lease),
        ]
        with own.suspended():
            for call in calls:
                started = time.monotonic()
                with pytest.raises(StoreUnavailable, match=own.endpoint):
                    call()
                assert time.monotonic() - started < 0.4 + 0.6
        for call in calls:
            retry.within(SOON_S)(call)


def test_a_watch_on_a_stopped_server_goes_on_when_the_server_does(own: EtcdServer) -> None:
    seen = Seen()
    with connect(own.endpoint) as store, connect(own.endpoint) as other:
        store.watch(ROOT, seen, after=0)
        put(other, f"{ROOT}a", "before")
        seen.wait("before")
        with own.suspended(), pytest.raises(StoreUnavailable):
            store.get(f"{ROOT}a")  # the store notices, and the watch with it
        put(other, f"{ROOT}a", "after")
        assert seen.wait("after") == ["before", "after"]


def test_a_watch_leaves_a_silent_server_when_a_call_finds_it_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_stream, "QUIET_S", 600.0)  # it would not find out by itself
    seen = Seen()
    with cluster(tmp_path) as members:
        everybody = ",".join(member.endpoint for member in members)
        with connect(everybody) as store:
            store.watch(ROOT, seen, after=0)
            put(store, f"{ROOT}a", "before")
            seen.wait("before")
            with member_at(members, store.endpoint).suspended():
                put(store, f"{ROOT}a", "after")
                assert seen.wait("after") == ["before", "after"]


def test_a_watch_finds_by_itself_that_its_server_is_silent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody calls this store; its member is stopped for good, the others carry on."""
    seen = Seen()
    with cluster(tmp_path) as members:
        everybody = ",".join(member.endpoint for member in members)
        with connect(everybody) as watcher:
            watcher.watch(ROOT, seen, after=0)
            silent = member_at(members, watcher.endpoint)
            with connect(next(m.endpoint for m in members if m is not silent)) as writer:
                put(writer, f"{ROOT}a", "before")
                seen.wait("before")
                silent.suspend()
                put(writer, f"{ROOT}a", "after")
                assert seen.wait("after") == ["before", "after"]
        assert watcher.endpoint != silent.endpoint
    assert "Traceback" not in caplog.text


def test_a_watch_whose_history_is_compacted_says_from_where_it_goes_on(own: EtcdServer) -> None:
    seen = Seen()
    with connect(own.endpoint) as store:
        old = store.put(f"{ROOT}a", "1")
        for n in range(5):
            last = store.put(f"{ROOT}a", f"missed {n}")
        own.call("kv/compaction", revision=last)
        store.watch(ROOT, seen, after=old, on_compacted=seen.compacted.append)
        wait_for(lambda: seen.compacted, SOON_S, "the news of the compaction")
        assert seen.compacted == [last]
        store.put(f"{ROOT}a", "new")
        assert seen.wait("new") == ["new"]


def test_a_hundred_watches_need_one_thread_and_outlive_their_server(own: EtcdServer) -> None:
    """A compacted one among them begins anew by itself."""
    each, behind = [Seen() for _ in range(100)], Seen()
    with connect(own.endpoint) as store:
        old = store.put(f"{ROOT}behind", "missed")
        own.call("kv/compaction", revision=store.put(f"{ROOT}behind", "old"))
        now = store.range(ROOT).revision
        before = threading.active_count()
        for n, seen in enumerate(each):
            store.watch(f"{ROOT}{n:03}", seen, after=now)
        store.watch(f"{ROOT}behind", behind, after=old - 1, on_compacted=behind.compacted.append)
        wait_for(lambda: behind.compacted, SOON_S, "the news of the compaction")
        assert threading.active_count() - before <= 3  # ours, and two of gRPC's
        store.put(f"{ROOT}007", "1")
        assert each[7].wait("1") == ["1"]
        own.kill()
        own.start()
        for n in range(100):
            put(store, f"{ROOT}{n:03}", "2")
        put(store, f"{ROOT}behind", "new")
        assert behind.wait("new") == ["new"]
        wait_for(lambda: all("2" in seen.values for seen in each), SOON_S, "all have been told")
    assert [seen.values for seen in each] == [["1", "2"] if n == 7 else ["2"] for n in range(100)]
    assert behind.compacted == [now]


def test_a_watch_says_so_when_the_servers_data_was_replaced(tmp_path: Path) -> None:
    seen = Seen()
    with server(tmp_path) as etcd, connect(etcd.endpoint) as store:
        for n in range(10):
            store.put(f"{ROOT}a", str(n))
        store.watch(ROOT, seen, after=0, on_compacted=seen.compacted.append)
        seen.wait("9")
        etcd.kill()
        etcd.member.data.rename(tmp_path / "lost")
        etcd.start()
        wait_for(lambda: seen.compacted, SOON_S, "the news of the loss")
        assert seen.compacted == [1]
        put(store, f"{ROOT}a", "new")
        assert seen.wait("new")[10:] == ["new"]


# ---- answers that are lost ----


def test_a_write_whose_answer_was_lost_is_reported_and_never_made_twice(etcd: EtcdServer) -> None:
    reported: list[StoreUnavailable] = []
    key = f"{ROOT}once"

    def write() -> None:
        try:
            store.put(key, "1")
        except StoreUnavailable as error:
            reported.append(error)

    with contextlib.ExitStack() as stack:
        direct = stack.enter_context(connect(etcd.endpoint))
        network = stack.enter_context(proxy(etcd.endpoint))
        store = EtcdStore(network.endpoint, timeout_s=SOON_S)
        stack.callback(store.close)
        assert store.get(key) is None
        network.lose_answers()
        writer = threading.Thread(target=write)
        writer.start()
        written = wait_for(lambda: direct.get(key), SOON_S, "the write")
        network.drop()
        writer.join(SOON_S)
        assert len(reported) == 1
        assert store.get(key) == written  # read again, as the caller will


# ---- several endpoints, and none ----


def test_calls_and_watches_go_on_when_the_member_they_use_is_killed(tmp_path: Path) -> None:
    seen = Seen()
    with cluster(tmp_path) as members:
        everybody = ",".join(member.endpoint for member in members)
        with connect(everybody) as store:
            store.watch(ROOT, seen, after=0)
            lost = store.endpoint
            put(store, f"{ROOT}a", "before")
            seen.wait("before")
            member_at(members, lost).kill()
            put(store, f"{ROOT}b", "after")
            assert store.endpoint != lost
            assert seen.wait("after") == ["before", "after"]


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
    assert time.monotonic() - started < TIMEOUT_S + 1.0


def test_a_host_that_does_not_exist_is_named_in_time() -> None:
    with connect("no-such-host.invalid:2379") as store:
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"no-such-host\.invalid"):
            store.get(f"{ROOT}a")
        assert time.monotonic() - started < TIMEOUT_S + 1.0


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


# ---- leases ----


def test_a_lease_outlives_a_restart_of_the_server_and_the_node_knows_of_the_silence(
    own: EtcdServer,
) -> None:
    told: list[str] = []
    with connect(own.endpoint) as store:
        keeper = LeaseKeeper(
            store,
            3,
            on_lost=lambda reason: told.append("lost"),
            on_silent=lambda reason: told.append("silent"),
            on_heard=lambda reason: told.append("heard"),
        )
        store.put(f"{ROOT}node", "here", lease=keeper.lease)
        own.kill()
        wait_for(lambda: keeper.state is LeaseState.SILENT, SOON_S, "the keeper is silent")
        own.start()
        wait_for(lambda: keeper.state is LeaseState.HELD, SOON_S, "the lease is held again")
        assert told == ["silent", "heard"]
        assert store.get(f"{ROOT}node") is not None
        keeper.close()
        assert store.get(f"{ROOT}node") is None
        assert told == ["silent", "heard"]


def test_the_loss_of_a_lease_is_told_once_with_the_reason(own: EtcdServer) -> None:
    reasons: list[str] = []
    with connect(own.endpoint) as store:
        keeper = LeaseKeeper(store, 3, on_lost=reasons.append)
        store.revoke(keeper.lease)
        wait_for(lambda: reasons, SOON_S, "the loss")
        assert reasons == [f"lease {keeper.lease:x} has ended"]
        assert keeper.state is LeaseState.LOST
        keeper.close()


def test_a_stopped_member_does_not_cost_the_lease(tmp_path: Path) -> None:
    """The lease must be refreshed elsewhere before its 3 s are over, patient as the store is."""
    lost: list[str] = []
    with cluster(tmp_path) as members:
        # Only the end of a leader would prolong the leases.
        two = ",".join(member.endpoint for member in members if not leads(member))
        with contextlib.closing(EtcdStore(two, timeout_s=10.0)) as store:
            keeper = LeaseKeeper(store, 3, on_lost=lost.append)
            with member_at(members, store.endpoint).suspended():
                wait_for(lambda: keeper.state is LeaseState.SILENT, SOON_S, "the silence")
                wait_for(lambda: keeper.state is not LeaseState.SILENT, SOON_S, "its end")
            assert (keeper.state, lost) == (LeaseState.HELD, [])
            keeper.close()


# ---- login and TLS ----


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[EtcdServer]:
    """A server that asks for a login and forgets it when it is not used for a second."""
    data, port = tmp_path / "data", free_port()
    member = Member(data=data, client_port=port, options=("--auth-token-ttl=1",))
    with contextlib.closing(EtcdServer(tmp_path, member).start()) as etcd:
        etcd.call("auth/user/add", name="root", password="secret")
        etcd.call("auth/role/add", name="root")
        etcd.call("auth/user/grant", user="root", role="root")
        etcd.call("auth/enable")
        yield etcd


def test_a_user_logs_in_and_again_when_the_login_is_forgotten(locked: EtcdServer) -> None:
    who = Credentials(user="root", password="secret")
    with connect(locked.endpoint, credentials=who) as store:
        put(store, f"{ROOT}a", "1")
        written = time.monotonic()
        wait_for(lambda: time.monotonic() - written > 3.0, SOON_S, "the end of the token")
        session = store._connection.session
        store.put(f"{ROOT}a", "2")
        assert store._connection.session is session  # logged in again, not connected again


def test_a_watch_of_a_user_outlives_a_restart_of_the_server(locked: EtcdServer) -> None:
    seen = Seen()
    who = Credentials(user="root", password="secret")
    with connect(locked.endpoint, credentials=who) as store:
        store.watch(ROOT, seen, after=0)
        put(store, f"{ROOT}a", "1")
        seen.wait("1")
        locked.kill()
        locked.start()
        put(store, f"{ROOT}a", "2")
        assert seen.wait("2") == ["1", "2"]


def test_who_may_not_write_is_refused(locked: EtcdServer) -> None:
    with connect(locked.endpoint) as store, pytest.raises(StoreRefused, match="give the user"):
        store.put(f"{ROOT}a", "1")
    wrong = Credentials(user="root", password="guessed")
    refused = pytest.raises(StoreRefused, match="invalid user ID or password")
    with connect(locked.endpoint, credentials=wrong) as store, refused:
        store.put(f"{ROOT}a", "1")


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for this machine and its key; it signs itself, so it is its authority."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    options = ["-addext", names, "-keyout", str(key), "-out", str(cert)]
    try:
        subprocess.run([*command.split(), *options], check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("needs the openssl command")
    return cert, key


def test_a_server_is_reached_over_tls_by_those_who_know_its_authority(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    cert, key = certificate
    port = free_port()
    urls = [f"--{side}-client-urls=https://127.0.0.1:{port}" for side in ("listen", "advertise")]
    options = (*urls, f"--cert-file={cert}", f"--key-file={key}")
    member = Member(data=tmp_path / "data", client_port=port, options=options)
    with contextlib.closing(EtcdServer(tmp_path, member)) as etcd:
        etcd.start(wait=False)
        trusted = Credentials(ca=cert)
        with connect(etcd.endpoint, credentials=trusted) as store:
            put(store, f"{ROOT}a", "1")
        with connect(etcd.endpoint) as store, pytest.raises(StoreUnavailable):
            store.get(f"{ROOT}a")
