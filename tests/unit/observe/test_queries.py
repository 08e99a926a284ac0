"""Questions of zero-ctl to agents: answered through the store, bounded, and nothing is left."""

import os
import time

import pytest

from tests.support.waiting import wait_for
from zero_agent.loop.answers import Answers
from zero_orchestrator.observe import queries
from zero_orchestrator.observe.events import progress_prefix
from zero_orchestrator.observe.queries import Answer, Asker, Query, ask_each, pack, unpack


@pytest.fixture
def job(root):
    """A job's name that no other test uses."""
    return root.strip("/").replace("/", "-")


@pytest.fixture
def agents(store, job):
    """Two agents that repeat what they are asked."""
    kinds = {"echo": lambda query: {"said": query.arguments["word"]}, "fail": lambda query: 1 / 0}
    made = [Answers(store, job, node, kinds) for node in "ab"]
    yield made
    for one in made:
        one.close()


def test_each_agent_answers_and_nothing_is_left_in_the_store(store, job, agents):
    found = ask_each(store, job, "echo", {node: {"word": "hello"} for node in "ab"}, within_s=30.0)
    assert {node: answer.record for node, answer in found.items()} == {
        "a": {"said": "hello"},
        "b": {"said": "hello"},
    }
    assert store.range(progress_prefix(job)).items == ()


def test_an_agent_that_does_not_answer_delays_nobody_for_longer_than_the_wait(store, job, agents):
    begun_s = time.monotonic()
    found = ask_each(store, job, "echo", {"a": {"word": "x"}, "gone": {"word": "x"}}, within_s=0.5)
    assert 0.5 <= time.monotonic() - begun_s < 30.0
    assert found["gone"].problem.startswith("no answer within 0.5 s: the agent hangs")


def test_a_question_that_no_agent_knows_or_that_fails_has_a_reason(store, job, agents, caplog):
    found = ask_each(store, job, "fly", {"a": {}}, within_s=30.0)["a"]
    assert found.problem == (
        "this agent answers echo, fail, not fly: it is of another version than zero-ctl"
    )
    found = ask_each(store, job, "fail", {"a": {}}, within_s=30.0)["a"]
    assert found.problem == "ZeroDivisionError('division by zero')"
    assert ask_each(store, job, "echo", {"a": {"word": 1}}, within_s=30.0)["a"].problem == ""


def test_a_later_question_of_the_same_asker_is_answered_as_well(store, job, agents):
    with Asker(store, job) as asker:
        for number in (1, 2, 3):
            asker.ask("echo", {"a": {"word": number}}, within_s=30.0)
            answer = next(iter(asker.answers(30.0)))
            assert (answer.number, answer.record) == (number, {"said": number})


def test_an_answer_that_is_too_large_says_so(monkeypatch):
    monkeypatch.setattr(queries, "ANSWER_BYTES", 300)
    answer = Answer(node="a", number=1, record={"noise": os.urandom(1000).hex()})
    assert "the limit is 300; ask for one --rank" in unpack(pack(answer)).problem
    with pytest.raises(ValueError, match="while decompressing"):
        unpack("nonsense")
    with pytest.raises(ValueError, match="a question of zero-ctl: number: is missing"):
        Query.from_json("{}")


def test_an_agent_that_starts_late_answers_a_question_that_waits(store, job):
    with Asker(store, job) as asker:
        asker.ask("echo", {"late": {"word": 1}}, within_s=30.0)
        late = Answers(store, job, "late", {"echo": lambda query: {"ok": True}})
        try:
            assert next(iter(asker.answers(30.0))).record == {"ok": True}
        finally:
            late.close()
    wait_for(lambda: not store.range(progress_prefix(job)).items, 30, "an empty store")
