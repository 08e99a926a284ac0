"""What every store must do with transactions."""

from __future__ import annotations

import threading

import pytest

from tests.support.watching import SOON_S, revision_of
from zero_orchestrator.errors import StoreRefused
from zero_orchestrator.store.kv import Delete, KeyValue, KeyValueStore, Put, absent, unchanged


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
