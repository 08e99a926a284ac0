"""What the store in memory has beyond the contract: clones, clients, a clock that is moved."""

from __future__ import annotations

import copy

import pytest

from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from zero_orchestrator.errors import LeaseLost
from zero_orchestrator.store.kv import Change, Put


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> MemoryStore:
    return MemoryStore(clock)


@pytest.mark.parametrize("clone", [MemoryStore.clone, copy.deepcopy])
def test_a_clone_goes_its_own_way(clone: object, store: MemoryStore, clock: ManualClock) -> None:
    lease = store.grant(3)
    store.put("a", "1", lease=lease)
    twin = clone(store)  # type: ignore[operator]
    assert twin.range("") == store.range("")
    assert twin.grant(3) == store.grant(3)
    twin.put("a", "2")
    store.delete("a")
    assert (twin.get("a").value, store.get("a")) == ("2", None)
    clock.advance(3.0)
    with pytest.raises(LeaseLost):
        twin.keep_alive(lease)


def test_a_clone_has_no_history(store: MemoryStore) -> None:
    store.put("a", "1")
    seen: list[Change] = []
    compacted: list[int] = []
    twin = store.clone()
    twin.watch("", seen.extend, after=0, on_compacted=compacted.append)
    twin.put("b", "1")
    assert (compacted, [change.key for change in seen]) == ([2], ["b"])


def test_clients_share_keys_and_watches_and_close_alone(store: MemoryStore) -> None:
    other, seen = store.client(), []
    store.watch("", seen.extend, after=1)
    other.put("a", "1")
    other.close()
    store.put("a", "2")
    assert [change.item.value for change in seen] == ["1", "2"]


def test_a_lease_ends_exactly_when_its_time_is_over(store: MemoryStore, clock: ManualClock) -> None:
    seen: list[Change] = []
    store.watch("", seen.extend, after=1)
    store.put("a", "1", lease=store.grant(3))
    clock.advance(2.9)
    store.expire()
    assert len(seen) == 1
    clock.advance(0.1)
    store.expire()
    assert seen[1:] == [Change("a", 3, None)]


def test_leases_end_in_the_order_of_their_times_each_with_a_revision(
    store: MemoryStore, clock: ManualClock
) -> None:
    late, early = store.grant(3), store.grant(2)
    store.txn([], [Put("late", "", late), Put("early", "", early)])
    seen: list[Change] = []
    store.watch("", seen.extend, after=2)
    clock.advance(60.0)
    store.expire()
    assert [(change.key, change.revision) for change in seen] == [("early", 3), ("late", 4)]


def test_what_a_callback_writes_is_delivered_after_what_it_saw(store: MemoryStore) -> None:
    order: list[str] = []

    def answer(changes: list[Change]) -> None:
        order.append(f"answer {changes[0].key}")
        if changes[0].key == "question":
            store.put("answer", "")

    store.watch("", answer, after=1)
    store.watch("", lambda changes: order.append(f"look {changes[0].key}"), after=1)
    store.put("question", "")
    assert order == ["answer question", "look question", "answer answer", "look answer"]


def test_a_compacted_history_is_reported_and_the_rest_is_watched(store: MemoryStore) -> None:
    for n in range(5):
        last = store.put("a", str(n))
    store.compact(last)
    seen: list[Change] = []
    compacted: list[int] = []
    store.watch("", seen.extend, after=last - 1)
    assert [change.revision for change in seen] == [last]
    store.watch("", seen.extend, after=last - 2, on_compacted=compacted.append)
    assert compacted == [last]
