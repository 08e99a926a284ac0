"""`zero-ctl logs --follow`: each line once, whatever becomes of the agents."""

from __future__ import annotations

import json
import re
import threading
from types import SimpleNamespace

import pytest

from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from tests.support.waiting import wait_for
from tests.support.written_job import Job
from zero_agent.loop.answers import Answers, kinds_of, last_output
from zero_agent.workers.output.recent import RecentOutput
from zero_orchestrator.ctl import cli, logs_command
from zero_orchestrator.ctl.views import JsonView, TableView
from zero_orchestrator.observe.events import output_prefix
from zero_orchestrator.observe.queries import Answer, pack


class Printer(JsonView):
    """Keeps what is shown."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.said: list[str] = []

    def record(self, record) -> None:
        json.dumps(record)
        self.texts.append(record["text"])

    def report(self, sentence: str) -> None:
        self.said.append(sentence)


class Node:
    """What one agent has of a node's output."""

    def __init__(self, store: MemoryStore, name: str, incarnation: str) -> None:
        self.store, self.name, self.incarnation = store, name, incarnation
        self.recent = RecentOutput()
        kinds = kinds_of(SimpleNamespace(recent=self.recent), incarnation)
        self._answers = Answers(store, "gpt", name, kinds)

    def prints(self, *lines: str, rank: int = 0) -> None:
        facts = {"round": 1, "rank": rank, "local_rank": rank, "stream": "stdout"}
        for line in lines:
            self.recent.add(facts, f"{line}\n".encode())

    def ends(self) -> None:
        """As an agent does at its end, unless it is killed."""
        self._answers.close()
        left = last_output(self.recent, self.name, self.incarnation, 16 << 10)
        self.store.put(output_prefix("gpt") + self.name, left)

    def is_killed(self) -> None:
        self._answers.close()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(ManualClock())


@pytest.fixture
def follow(store, monkeypatch):
    """Follows the job on a thread, with less patience than a person has."""
    monkeypatch.setattr(logs_command, "FOLLOW_S", 0.01)
    monkeypatch.setattr(logs_command, "LEAVING_S", 0.5)
    threads = []

    def begin(*flags: str) -> tuple[Printer, threading.Thread]:
        args = cli.make_parser().parse_args(["logs", "gpt", "--follow", *flags])
        view = Printer()
        thread = threading.Thread(target=logs_command.run, args=(args, store, view))
        thread.start()
        threads.append(thread)
        return view, thread

    yield begin
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def shown(view: Printer, *texts: str) -> None:
    wait_for(lambda: view.texts == [*texts], 60, f"{texts}")


def test_lines_come_once_through_a_restart_of_an_agent_and_to_the_last_word(store, follow):
    job = Job(store)
    job.live("a")
    job.round(1, "ACTIVE", "a")
    first = Node(store, "a", "1")
    first.prints("old", "one", "two")
    view, thread = follow("--lines=2")
    shown(view, "one", "two")
    first.prints("three")
    shown(view, "one", "two", "three")
    first.is_killed()
    second = Node(store, "a", "2")
    second.prints("four")
    shown(view, "one", "two", "three", "four")
    second.prints("the last word")
    second.ends()
    store.delete(job.keys.node("a"))
    job.round(1, "DONE", "a")
    thread.join(60)
    assert view.texts == ["one", "two", "three", "four", "the last word"]
    assert view.said == []


def test_only_the_lines_of_a_rank_are_followed_and_a_killed_node_leaves_none(store, follow):
    job = Job(store)
    job.live("ab")
    job.round(1, "ACTIVE", "ab")  # two workers each
    a, b = Node(store, "a", "1"), Node(store, "b", "1")
    view, thread = follow("--rank=1")
    a.prints("of rank 0")
    a.prints("of rank 1", rank=1)
    b.prints("of rank 2", rank=2)
    shown(view, "of rank 1")
    a.is_killed()
    b.ends()
    for name in "ab":
        store.delete(job.keys.node(name))
    job.round(1, "FAILED", "ab")
    thread.join(60)
    assert view.texts == ["of rank 1"]


def test_output_that_came_too_fast_is_said_to_be_missing(store, follow):
    job = Job(store)
    job.live("a")
    job.round(1, "ACTIVE", "a")
    node = Node(store, "a", "1")
    node.prints("begin")
    view, _ = follow()
    shown(view, "begin")
    noise = "x" * 10_000
    node.prints(*[noise] * 300)
    wait_for(lambda: view.said, 60, "the gap")
    assert view.said[0].startswith("node a: output is missing here")
    wait_for(lambda: len(view.texts) > 50, 60, "what is kept")
    node.ends()
    store.delete(job.keys.node("a"))
    job.round(1, "DONE", "a")


@pytest.mark.parametrize(
    "record",
    [
        {}, {"agent": "1"}, {"agent": 1, "chunks": [], "number": 0}, {"chunks": 3},
        {"agent": "1", "chunks": [{}], "number": 1}, {"agent": "1", "chunks": [1], "number": 1},
        {"ranks": [{}]}, {"ranks": [1]}, {"ranks": 1}, {"ranks": [{"rank": "a"}]},
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["logs", "stack"])
def test_an_answer_of_another_version_is_named_and_hides_no_other(command, record, capsys):
    memory = MemoryStore(ManualClock())
    job = Job(memory)
    job.live("ab")
    job.round(3, "ACTIVE", "ab")
    chunk = {"number": 1, "time": 1.5, "round": 3, "rank": 2, "stream": "stdout", "text": "good"}
    stack = 'Thread 0x01 (most recent call first):\n  File "/x.py", line 7 in good\n'
    good = {
        "logs": {"agent": "1", "chunks": [chunk], "number": 1, "lost": False},
        "stack": {"host": "h", "ranks": [{"rank": 2, "pid": 7, "text": stack}]},
    }
    if command == "stack" and not record.get("ranks"):
        record = {"ranks": None}
    agents = [
        Answers(memory, "gpt", name, {command: lambda query, of=of: of})
        for name, of in (("a", record), ("b", good[command]))
    ]
    memory.put(output_prefix("gpt") + "c", pack(Answer(node="c", number=1, record=record)))
    args = cli.make_parser().parse_args([command, "gpt"])
    try:
        cli._COMMANDS[command](args, memory, TableView())
    finally:
        for agent in agents:
            agent.close()
    said = capsys.readouterr().out
    assert "good" in said
    assert re.search(r"node a: its (answer|stacks) cannot be read", said)
