"""What every store must do with leases."""

from __future__ import annotations

import pytest

from tests.support.waiting import wait_for
from tests.support.watching import SOON_S
from zero_orchestrator.errors import LeaseLost
from zero_orchestrator.membership.failures import FOR_EVER_S
from zero_orchestrator.store.kv import KeyValueStore, Put, absent

TTL_S = 4
"""Of a lease that is to end: no sooner than what is written under it."""


def test_a_key_shows_its_lease_and_lives_while_it_is_kept_alive(
    store: KeyValueStore, root: str
) -> None:
    lease = store.grant(60)
    store.put(f"{root}a", "1", lease=lease)
    assert store.keep_alive(lease) == 60
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


def test_the_longest_exclusion_of_a_host_is_a_lease(store: KeyValueStore) -> None:
    lease = store.grant(FOR_EVER_S)
    assert FOR_EVER_S - 60 <= store.time_left(lease) <= FOR_EVER_S
    store.revoke(lease)
