"""A terminal or a log volume that stands still holds up nobody, and memory stays bounded."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator

from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from tests.support.waiting import wait_for
from zero_agent.workers.output import tap as output
from zero_agent.workers.output.tap import File, Tap, Terminal, _as_json
from zero_contract import journal, writer
from zero_contract.hub import Hub
from zero_contract.journal import Journal
from zero_contract.writer import Writer
from zero_orchestrator.store.lease import LeaseKeeper, LeaseState


class Gate:
    """A place to write to that stands still until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.taken: list[bytes] = []

    def write(self, data: bytes) -> None:
        assert self.open.wait(60)
        self.taken.append(data)


def test_what_is_written_comes_in_order_and_no_more_is_held_than_the_limit():
    gate, pen = Gate(), Writer("test", limit_bytes=10)
    assert [pen.put(gate.write, data) for data in (b"1234", b"5678", b"90", b"dropped")] == [
        True,
        True,
        True,
        False,
    ]
    assert pen.full
    assert not pen.flush(0.01)
    gate.open.set()
    assert pen.flush()
    assert gate.taken == [b"1234", b"5678", b"90"]


def test_what_a_signal_handler_writes_while_the_first_write_begins_comes_once(monkeypatch):
    gate, pen, start = Gate(), Writer("test"), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        signal.raise_signal(signal.SIGUSR1)
        start(thread)

    before = signal.signal(signal.SIGUSR1, lambda *_: pen.put(gate.write, b"handler"))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            pen.put(gate.write, b"interrupted")
    finally:
        signal.signal(signal.SIGUSR1, before)
    gate.open.set()
    assert pen.flush()
    assert gate.taken == [b"handler", b"interrupted"]


@contextlib.contextmanager
def unread_pipe() -> Iterator[tuple[int, int]]:
    """A pipe that is full, and has both ends: as a terminal under Ctrl-S."""
    reader, end = os.pipe()
    os.set_blocking(end, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(end, b"x" * 4096)
    os.set_blocking(end, True)
    try:
        yield reader, end
    finally:
        os.close(reader)
        os.close(end)


def told(fd: int, until: bytes) -> bytes:
    """What can be read of a pipe, up to some bytes."""
    found = b""
    while until not in found:
        found += os.read(fd, 1 << 16)
    return found


def test_a_terminal_that_nobody_reads_keeps_the_hub_from_nothing(monkeypatch):
    monkeypatch.setattr(writer, "STUCK_S", 0.2)
    with unread_pipe() as (reader, end):
        hub, terminal = Hub(), Terminal(end)
        terminal.writer._limit_bytes = 1 << 16
        tap = Tap(hub, terminal, None)
        for number in range(100):  # more than the pipes and the buffer hold
            os.write(tap.write_fd, b"%03d" % number * 1024 + b"\n")
        heard = threading.Event()
        signal_fd, ring = os.pipe()
        hub.add(signal_fd, lambda: (os.read(signal_fd, 1), heard.set()))
        os.write(ring, b".")
        assert heard.wait(60), "another descriptor is read"
        os.write(tap.write_fd, b"the end\n")
        wait_for(lambda: terminal._dropped_bytes, 60, "output is dropped")
        os.read(reader, 1 << 20)
        wait_for(lambda: not terminal.writer.stuck, 60, "the terminal goes on")
        os.write(tap.write_fd, b"and on\n")
        shown = told(reader, b"and on")
        assert b" bytes are missing here]" in shown
        tap.started()
        hub.remove(signal_fd, lambda: os.close(signal_fd))
        hub.close()
        os.close(ring)


def test_who_prints_faster_than_is_read_waits_and_loses_nothing():
    reader, end = os.pipe()
    hub, terminal = Hub(), Terminal(end)
    terminal.writer._limit_bytes = 1 << 16
    tap = Tap(hub, terminal, None)
    lines = b"".join(b"%06d\n" % number for number in range(100_000))

    def print_all() -> None:
        with open(tap.write_fd, "wb") as stream:
            stream.write(lines)

    printing = threading.Thread(target=print_all)
    printing.start()
    shown = b""
    while len(shown) < len(lines):
        shown += os.read(reader, 1 << 15)
    printing.join()
    hub.close()
    assert shown == lines
    os.close(reader)
    os.close(end)


def test_a_journal_on_a_volume_that_stands_still_holds_up_nobody_who_tells(tmp_path):
    path = tmp_path / "events.jsonl"
    os.mkfifo(path)  # opening it waits for a reader
    journal = Journal("a", path)
    began = time.monotonic()
    for number in range(3):
        journal.tell("start", f"event {number}")
    assert time.monotonic() - began < 5.0
    with path.open() as reader:
        first = json.loads(reader.readline())
    assert first["text"] == "event 0"


def test_a_log_line_does_not_wait_for_whoever_reads_it(monkeypatch):
    with unread_pipe() as (reader, end):
        terminal = Terminal(end)
        monkeypatch.setattr(output, "STDERR", terminal)
        handler = output.Log()
        handler.emit(logging.LogRecord("zero", logging.INFO, "", 0, "round %d runs", (3,), None))
        assert not terminal.writer.flush(0.05)
        assert told(reader, b"runs").endswith(b"round 3 runs\n")


def test_an_agent_whose_loop_does_not_turn_is_given_up_by_its_lease():
    clock, lost, turns = ManualClock(), [], [True]
    store = MemoryStore(clock)
    keeper = LeaseKeeper(store, 3, on_lost=lost.append, works=lambda: turns[0], clock=clock)
    store.put("node", "here", lease=keeper.lease)
    clock.advance(30.0)
    assert store.get("node") is not None
    turns[0] = False
    clock.advance(3.0)
    assert store.get("node") is None
    turns[0] = True
    clock.advance(1.0)
    assert (len(lost), keeper.state) == (1, LeaseState.LOST)


def test_a_file_of_events_is_bounded_and_keeps_the_newest(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "FILE_BYTES", 1000)
    path = tmp_path / "events-a.jsonl"
    pen = Journal("a", path)
    for number in range(60):
        pen.tell("start", f"event {number}")
    pen.close()
    kept = path.with_name("events-a.jsonl.1").read_text() + path.read_text()
    texts = [json.loads(line)["text"] for line in kept.splitlines()]
    assert texts == [f"event {number}" for number in range(60 - len(texts), 60)]
    assert 1000 <= len(kept) < 2200


def test_a_journal_whose_directory_cannot_be_made_says_so_once_and_stops_nobody(tmp_path, caplog):
    (tmp_path / "logs").touch()
    pen = Journal("a", tmp_path / "logs" / "events-a.jsonl")
    pen.tell("start", "one")
    pen.tell("start", "two")
    pen.close()
    lines = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"the journal {tmp_path}/logs/events-a.jsonl cannot be written: ")


ROOM_BYTES = 1 << 20


def test_output_goes_on_when_a_full_disk_has_room_and_what_is_missing_is_said(tmp_path, caplog):
    path, limits = tmp_path / "stdout.log", resource.getrlimit(resource.RLIMIT_FSIZE)
    file = File(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_BYTES, limits[1]))
    try:
        file.write(b"x" * (ROOM_BYTES + 1))
        file.write(b"yy")
        assert file.writer.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    file.write(b"z")
    file.write(b"z")
    assert file.writer.flush()
    file.close()
    note = b"\n[zero: 3 bytes are missing here]\n"
    assert path.read_bytes() == b"x" * ROOM_BYTES + note + b"zz"
    assert caplog.messages == [
        f"the output in {path} ends here until it has room: [Errno 27] File too large"
    ]


def test_a_line_in_json_is_cut_where_a_terminal_ends_it_alone():
    texts = ["a\u2028b\x85c", "d\x0ce\x1cf", "", "g"]
    lines = _as_json({}, "\n".join(texts).encode()).splitlines()
    assert [json.loads(line)["text"] for line in lines] == texts
