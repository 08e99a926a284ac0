"""`zero-ctl top`: the speed, the curve of the loss, and what fits on the screen."""

from __future__ import annotations

import argparse
import threading
from dataclasses import replace

import pytest
from rich.console import Console

from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from tests.unit.test_metrics import JOB
from tests.unit.test_status import Job
from zero_orchestrator.ctl import top_command
from zero_orchestrator.ctl.events import Event
from zero_orchestrator.ctl.history import History, Point
from zero_orchestrator.ctl.pace import Speed
from zero_orchestrator.ctl.top_command import screen, sparkline
from zero_orchestrator.ctl.views import JsonView, TableView, speed_in_words
from zero_orchestrator.errors import SpecError


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


def test_as_many_events_are_shown_as_fit():
    told = [Event(n, {"event": "start", "text": f"event {n}", "time": 0.0}) for n in range(100)]
    history = History(points=(point(1, 1.0, loss=3.0), point(2, 2.0, loss=2.0)))
    console = Console(width=200)
    with console.capture() as text:
        console.print(screen(replace(JOB, speed=Speed(steps=1.0)), history, told, height=40))
    lines = text.get().splitlines()
    assert lines[0] == "job gpt: ACTIVE"
    assert any(line.split()[:3] == ["speed", "1.00", "steps/s"] for line in lines)
    assert "loss        █▁" in lines
    assert lines[-1].endswith("event 99")
    assert len(lines) <= 40
    assert sum("event" in line for line in lines) > 10


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
