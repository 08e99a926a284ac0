"""`zero-ctl gc`: which jobs may go, and that nothing else does."""

from __future__ import annotations

import json

import pytest

from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from zero_orchestrator.ctl import cli
from zero_orchestrator.membership.job_state import NOBODY, Node, Snapshot, State
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.membership.moves import Move, Transition, transaction
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.observe import events, status
from zero_orchestrator.observe import gc as collect
from zero_orchestrator.observe.events import events_prefix, progress_prefix
from zero_orchestrator.observe.gc import Remains, due

NOW_S = 1_000_000_000.0
DAY_S = 86400.0
SPEC = JobSpec(min_nodes=1, max_nodes=1)


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore(ManualClock())


def job(store: MemoryStore, name: str, state: str, *, age_s: float, alive: bool = False) -> None:
    """A job with all the kinds of keys that one leaves."""
    keys = Keys(name)
    store.put(keys.spec, SPEC.to_json())
    store.put(keys.of_round(3, "members"), NOBODY.to_json())
    record = {"n": 3, "state": state, "cause": "because", "at": NOW_S - age_s}
    store.put(keys.round, json.dumps(record))
    told = {"time": NOW_S - age_s, "event": "finish", "text": "done"}
    store.put(events_prefix(name) + "a.1.000001", json.dumps(told))
    store.put(keys.in_memory, "{}")
    store.put(keys.secret, "of the job")
    if alive:
        lease = store.grant(3)
        node = Node(id="a", incarnation="1", address="a", slots=1)
        store.put(keys.node("a"), node.to_json(), lease=lease)
        store.put(progress_prefix(name) + "a", "{}", lease=lease)


def names(store: MemoryStore, **limits: object) -> list[str]:
    """What is deleted."""
    given = {"older_than_s": 7 * DAY_S, "keep": 200, "lost": False, **limits}
    return [doomed.remains.job for doomed in collect.collect(store, now_s=NOW_S, **given)]


def test_jobs_that_have_been_over_for_long_go_with_everything_that_was_kept_of_them(memory):
    job(memory, "old", "DONE", age_s=8 * DAY_S)
    job(memory, "older", "FAILED", age_s=30 * DAY_S)
    job(memory, "new", "STOPPED", age_s=6 * DAY_S)
    job(memory, "runs", "ACTIVE", age_s=30 * DAY_S, alive=True)
    job(memory, "old-2", "ACTIVE", age_s=30 * DAY_S, alive=True)
    before = memory.range("/zero/").items
    assert names(memory) == ["older", "old"]
    gone = {item.key for item in before} - {item.key for item in memory.range("/zero/").items}
    whose = ("/zero/v1/old/", "/zero/v1/older/", "/zero/events/old/", "/zero/events/older/")
    whose += ("/zero/progress/old/", "/zero/progress/older/")
    whose += ("/zero/secret/old/", "/zero/secret/older/")
    assert gone == {item.key for item in before if item.key.startswith(whose)}
    assert names(memory) == []


def test_of_many_jobs_that_are_over_the_last_ones_stay(memory):
    for number in range(5):
        job(memory, f"sweep-{number}", "DONE", age_s=DAY_S)
    assert names(memory, keep=2) == ["sweep-2", "sweep-1", "sweep-0"]
    assert {now.job for now in status.read_all(memory)} == {"sweep-3", "sweep-4"}


def test_a_job_that_its_agents_have_left_goes_only_when_asked_for_and_by_its_last_sign(memory):
    job(memory, "left", "ACTIVE", age_s=30 * DAY_S)
    told = {"time": NOW_S - DAY_S, "event": "exit", "text": "a worker was killed"}
    memory.put(events_prefix("left") + "a.1.000002", json.dumps(told))
    assert names(memory) == []
    assert names(memory, lost=True) == []
    assert names(memory, lost=True, older_than_s=DAY_S / 2) == ["left"]
    assert memory.range("/zero/").items == ()


def test_a_job_that_has_begun_again_since_it_was_looked_at_stays(memory):
    job(memory, "gpt", "ACTIVE", age_s=30 * DAY_S)
    (looked_at,) = collect.look(memory)
    job(memory, "gpt", "FORMING", age_s=0.0)
    assert not collect.delete(memory, looked_at)
    (looked_at,) = collect.look(memory)
    job(memory, "gpt", "FORMING", age_s=0.0, alive=True)
    assert not collect.delete(memory, looked_at)
    assert status.read(memory, "gpt").live_nodes == ("a",)


def test_what_cannot_be_understood_is_left_alone(memory):
    memory.put(Keys("future").round, '["of", "another", "version"]')
    memory.put(Keys("beyond").round, '{"n": 1, "state": "MOONED", "cause": "", "at": 1}')
    assert names(memory, lost=True) == []


def test_the_age_of_a_job_is_the_time_of_its_last_transition():
    keys, view = Keys("gpt"), Snapshot(SPEC, n=1, state=State.ACTIVE, fence=5)
    _, writes = transaction(keys, view, Transition(Move.FINISH, "done"), at_s=NOW_S)
    assert json.loads(writes[0].value)["at"] == NOW_S


def test_the_reason_says_for_how_long_or_how_many_ended_later():
    found = [
        Remains(job=name, state="DONE", revision=revision, last_s=NOW_S - age_s)
        for name, revision, age_s in (("c", 3, 60.0), ("b", 2, 3 * 3600.0), ("a", 1, 9 * DAY_S))
    ]
    reasons = [
        d.reason for d in due(found, now_s=NOW_S, older_than_s=7 * DAY_S, keep=1, lost=False)
    ]
    assert reasons == ["DONE for 3 hours; 1 that ended later stay", "DONE for 9 days"]


def test_the_command_says_what_would_go_and_what_went(memory, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_open", lambda args: memory.client())
    job(memory, "old", "DONE", age_s=0.0)
    for flags, said in (
        (["--dry-run"], "job old would be deleted: DONE for"),
        ([], "job old is deleted: DONE for"),
        ([], "nothing is to be deleted"),
    ):
        with pytest.raises(SystemExit, match="0"):
            cli.main(["gc", *flags])
        assert said in capsys.readouterr().out
    assert events.read(memory, "old") == ()
