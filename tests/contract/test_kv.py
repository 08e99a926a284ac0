"""What every store must do, run against the store in memory and a real etcd."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.support.etcd_server import EtcdServer, server
from tests.support.waiting import wait_for
from zero_orchestrator.errors import LeaseLost, StoreRefused, StoreUnavailable
from zero_orchestrator.kv import (
    Change,
    Delete,
    KeyValue,
    KeyValueStore,
    Put,
    Read,
    absent,
    unchanged,
)

SOON_S = 5.0
TTL_S = 2  # etcd's shortest lease at its present election timeout


class Seen:
    """Remembers the batches of one watch."""

    def __init__(self) -> None:
        self.batches: list[list[Change]] = []
        self.compacted: list[int] = []

    def __call__(self, changes: Sequence[Change]) -> None:
        self.batches.append(list(changes))

    @property
    def changes(self) -> list[Change]:
        return [change for batch in self.batches for change in batch]

    def wait(self, count: int) -> list[Change]:
        wait_for(lambda: len(self.changes) >= count, SOON_S, f"{count} changes")
        return self.changes


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """A server of this suite's own: some claims count its revisions."""
    with server(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture
def watch(store: KeyValueStore) -> Iterator[Callable[..., Seen]]:
    running = []

    def start(prefix: str, after: int) -> Seen:
        seen = Seen()
        running.append(store.watch(prefix, seen, after=after, on_compacted=seen.compacted.append))
        return seen

    yield start
    for each in running:
        each.cancel()


def revision_of(store: KeyValueStore) -> int:
    return store.range("/").revision


# ---- keys and revisions ----


def test_a_missing_key_is_none(store: KeyValueStore, root: str) -> None:
    assert store.get(f"{root}a") is None


def test_a_key_carries_the_revisions_of_its_creation_and_its_last_change(
    store: KeyValueStore, root: str
) -> None:
    created = store.put(f"{root}a", "1")
    changed = store.put(f"{root}a", "2")
    assert changed == created + 1
    assert store.get(f"{root}a") == KeyValue(f"{root}a", "2", created, changed)


def test_a_key_deleted_and_written_again_is_a_new_key(store: KeyValueStore, root: str) -> None:
    created = store.put(f"{root}a", "1")
    assert store.delete(f"{root}a") is True
    assert store.delete(f"{root}a") is False
    again = store.put(f"{root}a", "2")
    assert again == created + 2  # the second delete changed nothing
    assert store.get(f"{root}a") == KeyValue(f"{root}a", "2", again, again)


def test_a_range_holds_every_key_of_the_prefix_in_order_at_one_revision(
    store: KeyValueStore, root: str
) -> None:
    for name in ("b", "a/2", "ä", "a/1"):
        last = store.put(f"{root}in/{name}", name)
    store.put(f"{root}in", "not under it")
    found = store.range(f"{root}in/")
    assert [item.key for item in found.items] == [f"{root}in/{n}" for n in ("a/1", "a/2", "b", "ä")]
    assert max(item.mod_revision for item in found.items) == last
    assert found.revision == last + 1


def test_a_range_can_be_limited_to_the_first_keys_by_name_or_by_age(
    store: KeyValueStore, root: str
) -> None:
    for name in "cab":
        store.put(f"{root}{name}", "")

    def names(**how: Any) -> str:
        return "".join(item.key.removeprefix(root) for item in store.range(root, **how).items)

    assert names(limit=2) == "ab"
    assert names(oldest=True) == "cab"
    assert names(limit=2, oldest=True) == "ca"


def test_several_readings_are_of_one_revision(store: KeyValueStore, root: str) -> None:
    for name in ("a", "b/1", "b/2", "b/3"):
        last = store.put(root + name, name)
    one, some, none = store.read(
        [Read(f"{root}a"), Read(f"{root}b/", prefix=True, limit=2), Read(f"{root}c")]
    )
    assert [item.value for item in one.items] == ["a"]
    assert some.items == store.range(f"{root}b/").items[:2]
    assert none.items == ()
    assert {one.revision, some.revision, none.revision} == {last}


def test_an_empty_range_still_tells_the_revision(store: KeyValueStore, root: str) -> None:
    written = store.put(f"{root}a", "1")
    assert store.range(f"{root}none/").revision == written
    assert store.range(f"{root}none/").items == ()


def test_the_empty_prefix_is_every_key(store: KeyValueStore, root: str) -> None:
    store.put(f"{root}a", "1")
    assert f"{root}a" in [item.key for item in store.range("").items]


def test_values_are_any_text(store: KeyValueStore, root: str) -> None:
    for value in ("", "Grüße, 世界", "line\nline\0end", "x" * 100_000):
        store.put(f"{root}a", value)
        found = store.get(f"{root}a")
        assert found is not None
        assert found.value == value


def test_a_key_without_a_name_is_refused(store: KeyValueStore) -> None:
    with pytest.raises(StoreRefused):
        store.put("", "1")


# ---- transactions ----


def test_a_key_is_created_once(store: KeyValueStore, root: str) -> None:
    first = store.txn([absent(f"{root}a")], [Put(f"{root}a", "mine")])
    second = store.txn([absent(f"{root}a")], [Put(f"{root}a", "yours")])
    assert (first.succeeded, second.succeeded) == (True, False)
    assert second.revision == first.revision
    assert store.get(f"{root}a") == KeyValue(f"{root}a", "mine", first.revision, first.revision)


def test_a_key_is_changed_only_if_it_is_as_it_was_read(store: KeyValueStore, root: str) -> None:
    read = store.put(f"{root}a", "1")
    store.put(f"{root}a", "2")
    assert not store.txn([unchanged(f"{root}a", read)], [Put(f"{root}a", "stale")]).succeeded
    read = revision_of(store)
    assert store.txn([unchanged(f"{root}a", read)], [Put(f"{root}a", "3")]).succeeded
    found = store.get(f"{root}a")
    assert found is not None
    assert found.value == "3"


def test_all_comparisons_must_hold(store: KeyValueStore, root: str) -> None:
    there = store.put(f"{root}a", "1")
    compares = [unchanged(f"{root}a", there), absent(f"{root}b"), unchanged(f"{root}c", 0)]
    assert store.txn(compares, [Put(f"{root}b", "1")]).succeeded
    assert not store.txn(compares, [Put(f"{root}c", "1")]).succeeded
    assert store.get(f"{root}c") is None


def test_all_writes_of_a_transaction_share_a_revision(store: KeyValueStore, root: str) -> None:
    for name in ("old/1", "old/2", "gone"):
        store.put(root + name, "1")
    before = revision_of(store)
    writes = [
        Put(f"{root}new", "1"),
        Delete(f"{root}old/", prefix=True),
        Delete(f"{root}gone"),
        Delete(f"{root}never there"),
    ]
    result = store.txn([], writes)
    assert (result.succeeded, result.revision) == (True, before + 1)
    assert store.range(root).items == (
        KeyValue(f"{root}new", "1", result.revision, result.revision),
    )


def test_a_transaction_that_changes_nothing_is_no_revision(store: KeyValueStore, root: str) -> None:
    before = revision_of(store)
    result = store.txn([absent(f"{root}a")], [Delete(f"{root}a")])
    assert (result.succeeded, result.revision) == (True, before)
    assert store.txn([], []).revision == before


def test_a_transaction_writes_each_key_once(store: KeyValueStore, root: str) -> None:
    for writes in (
        [Put(f"{root}a", "1"), Put(f"{root}a", "2")],
        [Put(f"{root}a", "1"), Delete(f"{root}a")],
        [Delete(root, prefix=True), Put(f"{root}a", "1")],
    ):
        with pytest.raises(StoreRefused):
            store.txn([], writes)
    assert store.range(root).items == ()


def test_a_transaction_has_at_most_128_writes(store: KeyValueStore, root: str) -> None:
    writes = [Put(f"{root}{n:03}", "") for n in range(129)]
    assert store.txn([], writes[:128]).succeeded
    with pytest.raises(StoreRefused):
        store.txn([], writes)


def test_of_many_who_compare_the_same_revision_one_wins(store: KeyValueStore, root: str) -> None:
    start, won = threading.Barrier(8), []

    def compete(name: str) -> None:
        start.wait(SOON_S)
        if store.txn([absent(f"{root}a")], [Put(f"{root}a", name)]).succeeded:
            won.append(name)

    threads = [threading.Thread(target=compete, args=(str(n),)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    found = store.get(f"{root}a")
    assert found is not None
    assert won == [found.value]


# ---- leases ----


def test_a_key_shows_its_lease_and_lives_while_it_is_kept_alive(
    store: KeyValueStore, root: str
) -> None:
    lease = store.grant(TTL_S)
    store.put(f"{root}a", "1", lease=lease)
    assert store.keep_alive(lease) == TTL_S
    found = store.get(f"{root}a")
    assert found is not None
    assert found.lease == lease
    store.revoke(lease)


def test_a_lease_that_is_not_kept_alive_ends_and_takes_its_keys(
    store: KeyValueStore, root: str
) -> None:
    lease = store.grant(TTL_S)
    store.put(f"{root}a", "1", lease=lease)
    store.put(f"{root}b", "1", lease=lease)
    before = store.put(f"{root}stays", "1")
    wait_for(lambda: store.get(f"{root}a") is None, TTL_S + SOON_S, "the key is gone")
    found = store.range(root)
    assert [item.key for item in found.items] == [f"{root}stays"]
    assert found.revision == before + 1  # both keys went at once
    with pytest.raises(LeaseLost):
        store.keep_alive(lease)
    with pytest.raises(LeaseLost):
        store.put(f"{root}c", "1", lease=lease)
    with pytest.raises(LeaseLost):
        store.txn([absent(f"{root}c")], [Put(f"{root}d", "1"), Put(f"{root}c", "1", lease)])
    assert store.range(root) == found


def test_a_dead_lease_does_not_matter_where_the_comparison_fails(
    store: KeyValueStore, root: str
) -> None:
    lease = store.grant(TTL_S)
    store.revoke(lease)
    store.put(f"{root}a", "1")
    assert not store.txn([absent(f"{root}a")], [Put(f"{root}b", "1", lease)]).succeeded


def test_how_long_a_lease_has_left_can_be_seen(store: KeyValueStore) -> None:
    lease = store.grant(600)
    assert 590 <= store.time_left(lease) <= 600
    store.revoke(lease)
    assert store.time_left(lease) == 0


def test_a_revoked_lease_takes_its_keys_at_once_and_may_be_revoked_again(
    store: KeyValueStore, root: str
) -> None:
    lease = store.grant(60)
    store.put(f"{root}a", "1", lease=lease)
    store.revoke(lease)
    assert store.get(f"{root}a") is None
    store.revoke(lease)


def test_a_key_written_again_without_the_lease_outlives_it(store: KeyValueStore, root: str) -> None:
    lease = store.grant(60)
    store.put(f"{root}a", "1", lease=lease)
    store.put(f"{root}a", "2")
    store.revoke(lease)
    found = store.get(f"{root}a")
    assert found is not None
    assert (found.value, found.lease) == ("2", 0)


# ---- watches ----


def test_a_watch_delivers_what_came_before_it_and_what_comes_after(
    store: KeyValueStore, root: str, watch: Callable[..., Seen]
) -> None:
    start = store.put(f"{root}a", "read already")
    first = store.put(f"{root}a", "1")
    seen = watch(root, after=start)
    second = store.put(f"{root}b", "2")
    store.put("/zero/elsewhere", "3")
    store.delete(f"{root}a")
    assert seen.wait(3) == [
        Change(f"{root}a", first, KeyValue(f"{root}a", "1", start, first)),
        Change(f"{root}b", second, KeyValue(f"{root}b", "2", second, second)),
        Change(f"{root}a", second + 2, None),
    ]


def test_a_watch_may_begin_in_the_future(
    store: KeyValueStore, root: str, watch: Callable[..., Seen]
) -> None:
    seen = watch(root, after=revision_of(store) + 1)
    store.put(f"{root}a", "too early")
    store.put(f"{root}a", "1")
    (change,) = seen.wait(1)
    assert change.item is not None
    assert change.item.value == "1"


def test_changes_of_one_revision_come_in_one_batch_in_the_order_they_were_written(
    store: KeyValueStore, root: str, watch: Callable[..., Seen]
) -> None:
    store.put(f"{root}old", "1")
    seen = watch(root, after=revision_of(store))
    writes = [Put(f"{root}z", "1"), Delete(f"{root}old"), Put(f"{root}a", "1")]
    revision = store.txn([], writes).revision
    seen.wait(3)
    (batch,) = seen.batches
    assert {change.revision for change in batch} == {revision}
    assert [change.key for change in batch] == [f"{root}{n}" for n in ("z", "old", "a")]


def test_a_watch_sees_every_write_of_many_writers_once_and_in_order(
    store: KeyValueStore, root: str, watch: Callable[..., Seen]
) -> None:
    seen = watch(root, after=revision_of(store))

    def write(name: str) -> None:
        for n in range(50):
            store.put(f"{root}{name}", str(n))

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * SOON_S)
    revisions = [change.revision for change in seen.wait(200)]
    assert len(revisions) == 200
    assert revisions == sorted(set(revisions))


def test_the_end_of_a_lease_is_watched_as_one_batch(
    store: KeyValueStore, root: str, watch: Callable[..., Seen]
) -> None:
    lease = store.grant(60)
    for name in ("b", "a"):
        store.put(root + name, "1", lease=lease)
    seen = watch(root, after=revision_of(store))
    store.revoke(lease)
    seen.wait(2)
    (batch,) = seen.batches
    assert [(change.key, change.item) for change in batch] == [
        (f"{root}a", None),
        (f"{root}b", None),
    ]


def test_a_cancelled_watch_delivers_nothing_more(store: KeyValueStore, root: str) -> None:
    seen, still = Seen(), Seen()
    start = revision_of(store)
    cancelled = store.watch(root, seen, after=start)
    other = store.watch(root, still, after=start)
    store.put(f"{root}a", "1")
    seen.wait(1)
    cancelled.cancel()
    cancelled.cancel()
    store.put(f"{root}a", "2")
    still.wait(2)
    assert len(seen.changes) == 1
    other.cancel()


def test_a_watch_may_be_cancelled_by_its_own_callback(store: KeyValueStore, root: str) -> None:
    seen, still = Seen(), Seen()
    start = revision_of(store)

    def once(changes: Sequence[Change]) -> None:
        seen(changes)
        first.cancel()

    first = store.watch(root, once, after=start + 1)
    other = store.watch(root, still, after=start)
    for n in range(3):
        store.put(f"{root}a", str(n))
    still.wait(3)
    seen.wait(1)
    assert len(seen.batches) == 1
    other.cancel()


def test_a_callback_that_fails_does_not_end_its_watch(
    store: KeyValueStore, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Seen()

    def fail_first(changes: Sequence[Change]) -> None:
        seen(changes)
        if len(seen.batches) == 1:
            raise RuntimeError("a mistake of the caller")

    running = store.watch(root, fail_first, after=revision_of(store))
    store.put(f"{root}a", "1")
    seen.wait(1)
    store.put(f"{root}a", "2")
    assert [change.item.value for change in seen.wait(2) if change.item] == ["1", "2"]
    assert "a mistake of the caller" in caplog.text
    running.cancel()


# ---- the end ----


def test_a_closed_store_says_so_and_may_be_closed_again(store: KeyValueStore) -> None:
    store.close()
    store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        store.get("/zero/a")
