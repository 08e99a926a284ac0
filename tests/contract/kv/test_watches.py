"""What every store must do with watches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from tests.support.watching import SOON_S, Seen, revision_of
from zero_orchestrator.store.kv import Change, Delete, KeyValue, KeyValueStore, Put


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
