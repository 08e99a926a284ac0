"""What workers print is kept, rotated, shown as JSON and with ranks, and bounded."""

import json
import logging
import os
import pty

import pytest

from tests.support.waiting import wait_for
from zero_agent.loop.answers import last_output
from zero_agent.workers.output.recent import RecentOutput
from zero_agent.workers.output.streams import Format, Route, Std, Streams
from zero_agent.workers.output.tap import FILES, File, JsonLines, Tap, Terminal
from zero_contract.hub import Hub
from zero_orchestrator.observe.queries import unpack

FACTS = {"round": 1, "rank": 4, "local_rank": 0, "stream": "stdout"}
OTHER = {**FACTS, "rank": 5, "local_rank": 1}


def texts(page) -> list[str]:
    return [chunk.text.decode() for chunk in page.chunks]


def test_a_worker_that_prints_much_displaces_no_output_of_another():
    recent = RecentOutput(limit_bytes=1000)
    recent.add(OTHER, b"once\n")
    for number in range(100):
        recent.add(FACTS, b"%03d\n" % number)
    assert texts(recent.last(2, 10_000)) == ["once\n", "098\n", "099\n"]
    assert texts(recent.last(9, 10_000, rank=5)) == ["once\n"]
    kept = recent.last(1000, 10_000, rank=4)
    assert len(kept.chunks) == 9, "104 bytes each, in 1000"


def test_a_reader_gets_what_follows_and_learns_that_output_is_lost():
    recent = RecentOutput(limit_bytes=1000)
    recent.add(FACTS, b"a\nb\nc\n")
    page = recent.last(2, 10_000)
    assert (texts(page), page.number, page.lost) == (["b\nc\n"], 1, False)
    recent.add(OTHER, b"d\n")
    recent.add(FACTS, b"e\n")
    page = recent.after(1, 1)
    assert (texts(page), page.number) == (["d\n"], 2), "no more than fits, and one at least"
    page = recent.after(2, 1000)
    assert (texts(page), page.number, page.lost) == (["e\n"], 3, False)
    assert recent.after(3, 1000).chunks == []
    for _ in range(100):
        recent.add(FACTS, b"x\n")
    assert recent.after(3, 1000).lost
    assert not recent.after(3, 1000, rank=5).lost, "of this rank nothing is lost"


def test_what_an_agent_leaves_is_bounded_and_the_newest():
    recent = RecentOutput()
    for number in range(2000):
        recent.add(FACTS, b"%04d %s\n" % (number, os.urandom(40).hex().encode()))
    value = last_output(recent, "a", "1f", 4096)
    answer = unpack(value)
    assert len(value) <= 4096
    assert answer.record["chunks"][-1]["text"].startswith("1999 ")
    assert answer.record["lost"]


def test_a_log_file_keeps_the_newest_of_its_limit(tmp_path):
    path = tmp_path / "deep" / "stdout.log"
    file = File(path, limit_bytes=100)
    for number in range(50):
        file.write(b"line %04d\n" % number)
    file.close()
    assert FILES.flush()
    kept = path.with_name("stdout.log.1").read_text() + path.read_text()
    assert kept.splitlines() == [f"line {number:04d}" for number in range(40, 50)]
    again = File(path, limit_bytes=100)  # the next round
    again.write(b"more")
    again.close()
    assert FILES.flush()
    assert path.read_text() == "more"


def test_workers_that_share_a_file_move_it_once(tmp_path):
    path = tmp_path / "filtered.log"
    files = [File(path, limit_bytes=100), File(path, limit_bytes=100)]
    for number in range(40):
        files[number % 2].write(b"line %04d\n" % number)
    assert FILES.flush()
    kept = path.with_name("filtered.log.1").read_text() + path.read_text()
    lines = kept.splitlines()
    assert lines[-1] == "line 0039"
    assert lines == [f"line {number:04d}" for number in range(40 - len(lines), 40)]
    assert 5 <= len(lines) <= 11
    for file in files:
        file.close()


@pytest.fixture
def hub():
    made = Hub()
    yield made
    made.close()


def shown(hub: Hub, route: Route, written: bytes) -> str:
    """What a terminal, the writing end of a pipe or of a pty, shows of some output."""
    reader, writer = os.pipe()
    tap = Tap.along(hub, Terminal(writer), route)
    end = os.dup(tap.write_fd)
    tap.started()
    os.write(end, written)
    os.close(end)
    return _read(reader, writer)


def _read(reader: int, writer: int) -> str:
    os.set_blocking(reader, False)
    found: list[bytes] = []

    def more() -> bool:
        try:
            found.append(os.read(reader, 4096))
        except BlockingIOError:
            return bool(found)
        return False

    wait_for(more, 60, "the output")
    os.close(reader)
    os.close(writer)
    return b"".join(found).decode()


def test_each_line_is_a_json_object_with_its_rank(hub, tmp_path):
    streams = Streams(format=Format.JSON)
    route = streams.route(Std.OUT, tmp_path, 4, 0, "trainer")
    route = Route(**{**vars(route), "facts": {"node": "a", **FACTS}})
    lines = shown(hub, route, b"one\ntwo \xff\n").splitlines()
    records = [json.loads(line) for line in lines]
    assert [record.pop("text") for record in records] == ["one", "two \ufffd"]
    assert all(record.pop("time") > 0 for record in records)
    assert records == [{"node": "a", **FACTS}] * 2


def test_the_agents_own_lines_are_json_as_well():
    line = logging.LogRecord("zero", logging.WARNING, "", 0, "round %d", (3,), None)
    record = json.loads(JsonLines("a").format(line))
    assert record.pop("time") > 0
    assert record == {"node": "a", "level": "WARNING", "text": "round 3"}


def test_ranks_have_colours_on_a_terminal_alone(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    route = Streams(format=Format.RANK).route(Std.OUT, tmp_path, 4, 0, "trainer")
    assert shown(hub, route, b"one\n") == "[rank4]: one\n"
    assert not shown(hub, route, b"no end").endswith("\n"), "nothing is added"
    reader, writer = pty.openpty()
    assert Terminal(writer).has_colours
    monkeypatch.setenv("NO_COLOR", "1")
    assert not Terminal(writer).has_colours
    os.close(reader)
    os.close(writer)
