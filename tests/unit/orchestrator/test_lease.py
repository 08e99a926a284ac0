"""The lease keeper's decisions, on a manual clock; its life with real servers: contract/etcd."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from zero_orchestrator.errors import StoreRefused, StoreUnavailable
from zero_orchestrator.store.lease import LeaseKeeper, LeaseState, phase

TTL_S = 3


class Flaky(MemoryStore):
    """A store whose keep-alives and revocations can be cut off, or refused."""

    trouble: Exception | None = None

    def keep_alive(self, lease: int) -> float:
        if self.trouble:
            raise self.trouble
        return super().keep_alive(lease)

    def revoke(self, lease: int) -> None:
        if self.trouble:
            raise self.trouble
        super().revoke(lease)


class Node:
    """A keeper with its store, its clock, and all it was told."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = Flaky(self.clock)
        self.told: list[tuple[str, str]] = []
        self.keeper = LeaseKeeper(
            self.store,
            TTL_S,
            on_lost=lambda reason: self.told.append(("lost", reason)),
            on_silent=lambda reason: self.told.append(("silent", reason)),
            on_heard=lambda reason: self.told.append(("heard", reason)),
            clock=self.clock,
        )
        self.store.put("node", "here", lease=self.keeper.lease)

    @property
    def here(self) -> bool:
        return self.store.get("node") is not None


def test_a_lease_is_held_for_as_long_as_the_store_answers() -> None:
    node = Node()
    node.clock.advance(1000.0)
    assert node.here
    assert node.keeper.state is LeaseState.HELD
    assert node.keeper.unconfirmed_s <= TTL_S / 3
    assert node.told == []


def test_a_short_silence_of_the_store_is_told_once_and_costs_nothing() -> None:
    node = Node()
    node.clock.advance(1.5)
    node.store.trouble = StoreUnavailable("no answer")
    node.clock.advance(1.45)
    assert node.keeper.state is LeaseState.SILENT
    node.store.trouble = None
    node.clock.advance(0.3)
    assert [what for what, _ in node.told] == ["silent", "heard"]
    assert node.told[1][1].startswith("the store answers again, after ")
    assert node.keeper.state is LeaseState.HELD
    assert node.here


def test_silence_for_longer_than_the_lease_is_a_doubt_and_its_end_a_certainty() -> None:
    node = Node()
    node.store.trouble = StoreUnavailable("no answer")
    node.clock.advance(10.0)
    assert node.keeper.unconfirmed_s == 10.0
    assert node.told == [("silent", "no answer")]
    node.store.trouble = None
    node.clock.advance(10.0)
    assert node.told[1:] == [("lost", f"lease {node.keeper.lease:x} has ended")]
    assert node.keeper.state is LeaseState.LOST
    assert not node.here


def test_a_refusal_is_reported_as_silence_and_tried_again() -> None:
    node = Node()
    node.store.trouble = StoreRefused("permission denied")
    node.clock.advance(1.0)
    node.store.trouble = None
    node.clock.advance(1.0)
    assert [what for what, _ in node.told] == ["silent", "heard"]


def test_closing_ends_the_lease_at_once_and_is_not_a_loss() -> None:
    node = Node()
    node.keeper.close()
    assert not node.here
    node.keeper.close()
    node.clock.advance(10.0)
    assert node.told == []
    assert node.keeper.state is LeaseState.CLOSED


def test_closing_while_the_store_is_away_leaves_the_lease_to_end_by_itself() -> None:
    node = Node()
    node.store.trouble = StoreUnavailable("no answer")
    node.keeper.close()
    assert node.here
    node.clock.advance(TTL_S)
    assert not node.here
    assert node.told == []


def test_a_callback_that_fails_does_not_stop_the_refreshes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    node = Node()

    def fail(what: tuple[str, str]) -> None:
        raise RuntimeError("a mistake of the agent")

    node.told = type("Failing", (list,), {"append": staticmethod(fail)})()
    node.store.trouble = StoreUnavailable("no answer")
    node.clock.advance(1.0)
    node.store.trouble = None
    node.clock.advance(100.0)
    assert node.here
    assert "a mistake of the agent" in caplog.text


def test_a_keep_alive_that_finds_no_thread_or_descriptor_is_tried_again(caplog) -> None:
    node = Node()
    node.store.trouble = RuntimeError("can't start new thread")
    node.clock.advance(TTL_S / 3)
    assert node.keeper.state is LeaseState.SILENT
    node.store.trouble = None
    node.clock.advance(100.0)
    assert (node.here, node.keeper.state) == (True, LeaseState.HELD)
    assert "can't start new thread" in caplog.text


class Fleet:
    """Holders that were all given their leases at once, and when each has refreshed its own."""

    def __init__(self, size: int) -> None:
        self.clock = ManualClock()
        self.beats: list[tuple[float, int]] = []
        self.store = Flaky(self.clock)
        refresh = self.store.keep_alive

        def keep_alive(lease: int) -> float:
            self.beats.append((self.clock.now(), lease))
            return refresh(lease)

        self.store.keep_alive = keep_alive  # type: ignore[method-assign]
        self.keepers = [
            LeaseKeeper(self.store, TTL_S, on_lost=pytest.fail, clock=self.clock)
            for _ in range(size)
        ]

    def most_at_once(self, since_s: float) -> int:
        """Refreshes in the worst tenth of a period."""
        slots = Counter(int(now_s * 30 / TTL_S) for now_s, _ in self.beats if now_s >= since_s)
        return max(slots.values())


def test_a_fleet_that_starts_together_refreshes_its_leases_evenly_over_the_period() -> None:
    fleet = Fleet(500)
    fleet.clock.advance(10 * TTL_S / 3)
    assert fleet.most_at_once(since_s=0.0) <= 2 * 500 / 10
    by_lease = Counter(lease for _, lease in fleet.beats)
    assert set(by_lease.values()) == {10}, "no more of them than before"
    assert all(0 < phase(lease) <= 1 for lease in by_lease)


def test_after_an_outage_of_the_store_a_fleet_falls_out_of_step_again() -> None:
    fleet = Fleet(500)
    fleet.clock.advance(TTL_S)
    fleet.store.trouble = StoreUnavailable("no answer")
    fleet.clock.advance(TTL_S / 2)
    fleet.store.trouble = None
    healed_s = fleet.clock.now()
    fleet.clock.advance(TTL_S)
    assert fleet.most_at_once(healed_s + TTL_S / 3) <= 2 * 500 / 10
    assert {keeper.state for keeper in fleet.keepers} == {LeaseState.HELD}
