"""What the store promises when its server is killed, stopped, or loses what it held."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.etcd.client import HANGS_S, ROOT, connect, member_at, put
from tests.support.etcd_server import EtcdServer, cluster, server
from tests.support.proxy import proxy
from tests.support.waiting import wait_for
from tests.support.watching import SOON_S, Seen
from zero_orchestrator.errors import StoreUnavailable
from zero_orchestrator.store import retry
from zero_orchestrator.store.etcd import watch
from zero_orchestrator.store.etcd.client import EtcdStore
from zero_orchestrator.store.kv import Put, absent
from zero_orchestrator.store.replica import Replica

pytestmark = pytest.mark.etcd

# ---- servers that come back ----


def test_a_watch_goes_on_after_its_server_was_killed_and_started_again(
    own: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Seen()
    with connect(own.endpoint) as store, connect(own.endpoint) as other:
        store.watch(ROOT, seen, after=0)
        for value in ("0", "1"):
            put(other, f"{ROOT}a", value)
        seen.wait_value("1")
        own.kill()
        own.start()
        for value in ("2", "3"):
            put(other, f"{ROOT}a", value)
        assert seen.wait_value("3") == ["0", "1", "2", "3"]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_watch_sees_what_was_written_while_it_had_no_server(tmp_path: Path, binary: Path) -> None:
    """Two members stay up and are written to; the watcher knows the third one alone."""
    seen = Seen()
    with cluster(tmp_path, binary=binary) as members, connect(members[0].endpoint) as watcher:
        watcher.watch(ROOT, seen, after=0)
        with connect(members[1].endpoint) as writer:
            put(writer, f"{ROOT}a", "before")
            seen.wait_value("before")
            members[0].kill()
            for n in range(20):
                put(writer, f"{ROOT}a", f"during {n}")
            members[0].start()
            put(writer, f"{ROOT}a", "after")
        assert seen.wait_value("after") == ["before", *(f"during {n}" for n in range(20)), "after"]


@pytest.mark.full
def test_every_call_to_a_stopped_server_ends_in_time_and_works_when_it_goes_on(
    own: EtcdServer,
) -> None:
    with contextlib.closing(EtcdStore(own.endpoint, timeout_s=0.4)) as store:
        put(store, f"{ROOT}a", "1")
        # What had no answer in time may have been done: a lease that is revoked is one of its own.
        lease, revoked = (retry.within(SOON_S)(store.grant, 60) for _ in range(2))
        calls: list[Callable[[], object]] = [
            lambda: store.get(f"{ROOT}a"),
            lambda: store.range(ROOT),
            lambda: store.put(f"{ROOT}b", "1"),
            lambda: store.delete(f"{ROOT}b"),
            lambda: store.txn([absent(f"{ROOT}b")], [Put(f"{ROOT}b", "1")]),
            lambda: store.grant(60),
            lambda: store.keep_alive(lease),
            lambda: store.revoke(revoked),
        ]
        with own.suspended():
            for call in calls:
                started = time.monotonic()
                with pytest.raises(StoreUnavailable, match=own.endpoint):
                    call()
                assert time.monotonic() - started < HANGS_S
        for call in calls:
            retry.within(SOON_S)(call)


def test_a_watch_on_a_stopped_server_goes_on_when_the_server_does(own: EtcdServer) -> None:
    seen = Seen()
    with connect(own.endpoint) as store, connect(own.endpoint) as other:
        store.watch(ROOT, seen, after=0)
        put(other, f"{ROOT}a", "before")
        seen.wait_value("before")
        with own.suspended(), pytest.raises(StoreUnavailable):
            store.get(f"{ROOT}a")  # the store notices, and the watch with it
        put(other, f"{ROOT}a", "after")
        assert seen.wait_value("after") == ["before", "after"]


@pytest.mark.full
def test_a_watch_leaves_a_silent_server_when_a_call_finds_it_silent(
    tmp_path: Path, binary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "QUIET_S", 600.0)  # it would not find out by itself
    seen = Seen()
    with cluster(tmp_path, binary=binary) as members:
        everybody = ",".join(member.endpoint for member in members)
        with connect(everybody) as store:
            store.watch(ROOT, seen, after=0)
            put(store, f"{ROOT}a", "before")
            seen.wait_value("before")
            with member_at(members, store.endpoint).suspended():
                put(store, f"{ROOT}a", "after")
                assert seen.wait_value("after") == ["before", "after"]


@pytest.mark.full
def test_a_watch_finds_by_itself_that_its_server_is_silent(
    tmp_path: Path, binary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody calls this store; its member is stopped for good, the others carry on."""
    seen = Seen()
    with cluster(tmp_path, binary=binary) as members:
        everybody = ",".join(member.endpoint for member in members)
        with connect(everybody) as watcher:
            watcher.watch(ROOT, seen, after=0)
            silent = member_at(members, watcher.endpoint)
            with connect(next(m.endpoint for m in members if m is not silent)) as writer:
                put(writer, f"{ROOT}a", "before")
                seen.wait_value("before")
                silent.suspend()
                put(writer, f"{ROOT}a", "after")
                assert seen.wait_value("after") == ["before", "after"]
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
        assert seen.wait_value("new") == ["new"]


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
        assert each[7].wait_value("1") == ["1"]
        own.kill()
        own.start()
        for n in range(100):
            put(store, f"{ROOT}{n:03}", "2")
        put(store, f"{ROOT}behind", "new")
        assert behind.wait_value("new") == ["new"]
        wait_for(lambda: all("2" in seen.values for seen in each), SOON_S, "all have been told")
    assert [seen.values for seen in each] == [["1", "2"] if n == 7 else ["2"] for n in range(100)]
    assert behind.compacted == [now]


def test_a_watch_says_so_when_the_servers_data_was_replaced(tmp_path: Path) -> None:
    seen = Seen()
    with server(tmp_path) as etcd, connect(etcd.endpoint) as store:
        for n in range(10):
            store.put(f"{ROOT}a", str(n))
        store.watch(ROOT, seen, after=0, on_compacted=seen.compacted.append)
        seen.wait_value("9")
        etcd.kill()
        etcd.member.data.rename(tmp_path / "lost")
        etcd.start()
        wait_for(lambda: seen.compacted, SOON_S, "the news of the loss")
        assert seen.compacted == [1]
        put(store, f"{ROOT}a", "new")
        assert seen.wait_value("new")[10:] == ["new"]


def test_another_cluster_in_the_servers_place_is_noticed_although_its_revision_is_later(
    tmp_path: Path,
) -> None:
    woken = threading.Event()
    with server(tmp_path) as etcd, connect(etcd.endpoint) as store:
        before = store.put(f"{ROOT}a", "1")
        copy = Replica(store, ROOT, woken.set)
        etcd.kill()
        member = dataclasses.replace(etcd.member, name="other", data=tmp_path / "other")
        with contextlib.closing(EtcdServer(tmp_path, member)) as other:
            other.start()
            while (after := put(store, "/later", "1")) <= before:
                pass
            wait_for(lambda: woken.wait(0.1) and copy.look() and copy.jump(), SOON_S, "the news")
            now = copy.look()
    assert (now.items, now.revision) == ((), after)


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


def test_a_write_that_is_lost_with_the_leader_ends_when_the_others_have_a_new_one(
    tmp_path: Path,
) -> None:
    """The member to which it was sent says nothing for 7 s, and the store waits for longer."""
    with cluster(tmp_path) as members:
        leader = next(member for member in members if leads(member))
        others = ",".join(member.endpoint for member in members if member is not leader)
        with contextlib.closing(EtcdStore(others, timeout_s=HANGS_S)) as store:
            put(store, f"{ROOT}a", "1")
            leader.kill()
            said = ""
            # Its member may have heard of the end before, on a busy machine: then it is no loss.
            try:
                store.put(f"{ROOT}a", "2")
            except StoreUnavailable as error:
                said = str(error)
            assert "request timed out" not in said, "the server's words, 7 s later"
            alive = [each for each in members if each is not leader]
            wait_for(lambda: sum(map(leads, alive)) == 1, SOON_S, "one leader of the others")


def test_where_writes_are_slow_a_change_of_the_leader_costs_one_of_them_at_most(
    tmp_path: Path,
) -> None:
    """The others do not confirm a write before the store has looked who leads, as slow disks do."""
    with cluster(tmp_path, options=("--election-timeout=20000",)) as members:
        before = next(member for member in members if leads(member))
        here = next(member for member in members if member is not before)
        others = [member for member in members if member is not here]
        with contextlib.closing(EtcdStore(here.endpoint, timeout_s=HANGS_S)) as store:
            put(store, f"{ROOT}a", "before")
            here_id = here.call("maintenance/status")["header"]["member_id"]  # type: ignore[index]
            before.call("maintenance/transfer-leadership", targetID=here_id)
            wait_for(lambda: leads(here), SOON_S, "another leader")
            done = [write_slowly(store, value, here, others) for value in ("1", "2", "3")]
            assert done[1:] == [True, True]
            assert store.get(f"{ROOT}a").value == "3"  # type: ignore[union-attr]


def write_slowly(store: EtcdStore, value: str, at: EtcdServer, others: list[EtcdServer]) -> bool:
    """Whether a write was answered for which the others had no time until the store has looked."""
    done: list[int] = []

    def write() -> None:
        with contextlib.suppress(StoreUnavailable):
            done.append(store.put(f"{ROOT}a", value))

    writer, looks = threading.Thread(target=write), looks_at(at)
    with contextlib.ExitStack() as slow:
        for other in others:
            slow.enter_context(other.suspended())
        writer.start()
        wait_for(lambda: looks_at(at) > looks, SOON_S, "a look")
    writer.join(SOON_S)
    return bool(done)


def looks_at(member: EtcdServer) -> float:
    """How often a member has been asked for its status."""
    with urllib.request.urlopen(f"http://{member.endpoint}/metrics") as answer:
        found = re.findall(r'grpc_server_started_total{.*"Status".*} (.*)', answer.read().decode())
    return sum(map(float, found))


def leads(member: EtcdServer) -> bool:
    """Whether a member is its cluster's leader."""
    status = member.call("maintenance/status")
    return bool(status["leader"] == status["header"]["member_id"])  # type: ignore[index]
