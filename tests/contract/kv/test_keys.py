"""What every store must do with keys and ranges, and at its end."""

from __future__ import annotations

import pytest

from zero_orchestrator.errors import StoreRefused, StoreUnavailable
from zero_orchestrator.store.kv import KeyValue, KeyValueStore, Read

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


def test_a_range_can_be_limited_to_the_first_keys_by_name(store: KeyValueStore, root: str) -> None:
    for name in "cab":
        store.put(f"{root}{name}", "")

    found = store.range(root, limit=2).items
    assert [item.key.removeprefix(root) for item in found] == ["a", "b"]


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


# ---- the end ----


def test_a_closed_store_says_so_and_may_be_closed_again(store: KeyValueStore) -> None:
    store.close()
    store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        store.get("/zero/a")
