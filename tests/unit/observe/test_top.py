"""`zero-ctl top`: the speed, the curve of the loss, and what fits on the screen."""

from __future__ import annotations

import argparse
import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from tests.support.staged import staged
from tests.support.written_job import Job
from tests.unit.observe.test_metrics import JOB
from zero_orchestrator.ctl import top_command
from zero_orchestrator.ctl.top_command import screen, scrolled, sparkline, window
from zero_orchestrator.ctl.views import JsonView, TableView, speed_in_words
from zero_orchestrator.errors import SpecError
from zero_orchestrator.observe import status
from zero_orchestrator.observe.events import Event
from zero_orchestrator.observe.history import History, Point
from zero_orchestrator.observe.pace import Speed


def point(step: int, time_s: float, *, loss: float) -> Point:
    return Point(step=step, time_s=time_s, samples=0, workers=2, loss=loss)


def test_a_slow_speed_is_the_time_of_a_step():
    assert speed_in_words(Speed(steps=0.1, samples=6.4)) == "a step in 10 s, 6 samples/s"
    assert speed_in_words(Speed(steps=15.0)) == "15.00 steps/s", "without what is not known"


def test_a_curve_goes_from_the_lowest_to_the_highest_value_and_fits():
    assert sparkline([4.0, 2.0, 0.5], 80) == "█▄▁"
    assert sparkline([1.0, 1.0], 80) == "▁▁"
    assert sparkline([8.0, 8.0, 4.0, 4.0, 1.0], 3) == "█▄▁", "a bar is the mean of two"
    assert sparkline([], 80) == ""


def rendered(name: str, width: int) -> tuple[Console, list]:
    """All lines of a staged job on a terminal of this width."""
    store = MemoryStore(ManualClock())
    staged(name).write(store)
    console = Console(width=width, height=24, color_system=None, markup=False, highlight=False)
    shown = screen(status.read(store, name), *top_command._read(store, name))
    return console, console.render_lines(shown, pad=False)


def texts(lines) -> list[str]:
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


def test_the_newest_events_are_above_the_tables_and_all_others_below():
    told = [Event(n, {"event": "start", "text": f"event {n}", "time": 0.0}) for n in range(100)]
    history = History(points=(point(1, 1.0, loss=3.0), point(2, 2.0, loss=2.0)))
    console = Console(width=200, color_system=None)
    lines = texts(
        console.render_lines(screen(replace(JOB, speed=Speed(steps=1.0)), history, told), pad=False)
    )
    assert lines[0] == "job gpt: ACTIVE"
    assert any(line.split()[:3] == ["speed", "1.00", "steps/s"] for line in lines)
    assert "loss        █▁" in lines
    shown = [int(line.rpartition(" ")[2]) for line in lines if " event " in line]
    assert shown == list(range(99, -1, -1))
    table = next(place for place, line in enumerate(lines) if line.startswith("rank"))
    assert sum(" event " in line for line in lines[:table]) == top_command.NEWEST


KEYS = st.lists(st.sampled_from(["up", "down", "page up", "page down", "home", "end", "", "q"]))


@given(KEYS, st.integers(1, 60), st.integers(1, 60))
def test_no_key_leaves_the_lines_and_every_line_can_be_reached(keys, count, height):
    top = 0
    for key in keys:
        before, top = top, scrolled(top, key, count, height)
        assert 0 <= top <= max(0, count - height)
        assert abs(top - before) <= height or key in {"home", "end"}
    assert scrolled(top, "home", count, height) == 0
    top, seen = 0, set(range(height))
    for _ in range(count):
        top = scrolled(top, "page down", count, height)
        seen |= set(range(top, top + height))
    assert seen >= set(range(count))
    assert scrolled(count, "", count // 2, height) <= max(0, count // 2 - height), "fewer lines"


ROOM = {40: "pids, devices, host, address, workers, loss", 80: "pids, devices, host", 250: ""}


@pytest.mark.parametrize("width", ROOM)
def test_no_line_is_cut_and_what_has_no_room_is_named(width):
    _, lines = rendered("recovered", width)
    shown = texts(lines)
    assert all(len(line) <= width for line in shown)
    assert not any("…" in line for line in shown)
    text = " ".join(" ".join(shown).split())
    named = text.partition("no room for: ")[2].partition(" rank ")[0]
    assert named == ROOM[width]


def test_the_last_line_says_what_there_is_beyond_the_screen_and_the_keys():
    console, lines = rendered("recovered", 80)
    console.width, console.height = 80, 24
    with console.capture() as text:
        console.print(window(lines, 3, 23))
    shown = text.get().splitlines()
    assert len(shown) == 24
    assert shown[0].rstrip() == texts(lines)[3]
    assert shown[-1].rstrip() == f"4-26 of {len(lines)} lines; arrows, page keys; q quits"
    with console.capture() as text:
        console.print(window(lines[:5], 0, 23))
    assert text.get().splitlines()[-1].rstrip() == "q quits"


def test_without_a_terminal_the_remedy_is_named():
    with pytest.raises(SpecError, match=r"needs a terminal.*status --watch"):
        top_command.run(argparse.Namespace(json=False), None, JsonView())


def test_it_follows_a_job_to_its_end_and_leaves_its_status_on_the_terminal(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("COLUMNS", "120")
    store = MemoryStore(ManualClock())
    job = Job(store)
    job.live("a")
    job.round(1, "ACTIVE", "a")
    args = argparse.Namespace(json=False, job="gpt", every=0.01)
    runs = threading.Thread(target=top_command.run, args=(args, store, TableView()))
    runs.start()
    job.round(1, "DONE", "a")
    runs.join(30)
    shown = capsys.readouterr().out
    assert not runs.is_alive()
    assert "\x1b[?1049h" in shown, "a screen of its own"
    assert "DONE" in shown.split("\x1b[?1049l")[1], "what stays"
