"""While the agent waits for the store it goes on with what happens."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest

from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from zero_agent.loop.agent import Agent
from zero_agent.loop.pumped_store import PumpedStore
from zero_contract.clock import SystemClock
from zero_orchestrator.errors import StoreUnavailable
from zero_orchestrator.store.kv import KeyValue


class Slow(MemoryStore):
    """Answers when it is let."""

    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.let = threading.Event()

    def get(self, key: str) -> KeyValue | None:
        assert self.let.wait(10)
        if key == "away":
            raise StoreUnavailable("no answer")
        return super().get(key)


class Loop:
    """An agent's inbox, and the store as its thread sees it."""

    def __init__(self) -> None:
        self.store = Slow()
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.seen = PumpedStore(
            self.store,
            meanwhile=self.handle,
            wake=lambda: self.inbox.put(lambda: None),
        )

    def handle(self) -> None:
        self.inbox.get(timeout=10)()


@pytest.fixture
def loop():
    loop = Loop()
    loop.store.put("key", "value")
    yield loop
    loop.store.let.set()
    loop.seen.leave_alone()


def test_what_arrives_during_a_call_is_done_before_its_answer(loop) -> None:
    done = []
    loop.inbox.put(lambda: done.append("first"))
    loop.inbox.put(loop.store.let.set)
    found = loop.seen.get("key")
    assert (done, found.value) == (["first"], "value")


def test_an_error_of_the_store_is_the_callers(loop) -> None:
    loop.store.let.set()
    with pytest.raises(StoreUnavailable, match="no answer"):
        loop.seen.get("away")


def test_who_must_end_does_not_wait_for_the_answer_and_may_call_again_later(loop) -> None:
    def end() -> None:
        raise KeyboardInterrupt

    loop.inbox.put(end)
    with pytest.raises(KeyboardInterrupt):
        loop.seen.get("key")
    loop.seen.leave_alone()
    loop.store.let.set()
    assert loop.seen.get("key").value == "value"


def test_a_call_during_a_call_is_a_mistake_that_shows(loop) -> None:
    loop.inbox.put(lambda: loop.seen.get("key"))
    with pytest.raises(AssertionError, match="during another"):
        loop.seen.get("key")


def test_other_threads_calls_pass_straight_through(loop) -> None:
    loop.store.let.set()
    found: list[KeyValue | None] = []
    other = threading.Thread(target=lambda: found.append(loop.seen.get("key")))
    other.start()
    other.join(10)
    assert (found[0].value, loop.inbox.empty()) == ("value", True)


def test_a_flood_of_events_keeps_no_loop_from_its_next_turn() -> None:
    agent = object.__new__(Agent)
    agent._clock, agent._inbox = SystemClock(), queue.SimpleQueue()

    def again() -> None:
        agent._inbox.put(again)

    again()
    turn = threading.Thread(target=agent._handle_events, daemon=True)
    turn.start()
    turn.join(60)
    assert not turn.is_alive()
