"""`zero-ctl top`: the speed, the curve of the loss, and what fits on the screen."""

from __future__ import annotations

import argparse
import threading
from dataclasses import replace

import pytest
from rich.console import Console

from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from tests.unit.test_metrics import JOB, NODE
from tests.unit.test_status import Job
from zero_orchestrator.ctl import top_command
from zero_orchestrator.ctl.events import Event
from zero_orchestrator.ctl.top_command import Speed, screen, sparkline
from zero_orchestrator.ctl.views import JsonView, TableView
from zero_orchestrator.errors import SpecError


def at(step: int, loss: float | None = None):
    return replace(JOB, members=(replace(NODE, step=step, loss=loss),))


def test_the_speed_is_that_of_the_last_minute():
    speed = Speed()
    assert speed.steps_per_s(0.0) is None
    for second in range(0, 200, 10):
        speed.add(at(second * (1 if second < 100 else 3)), float(second))
    assert speed.steps_per_s(190.0) == pytest.approx(3.0)
    assert speed.steps_per_s(250.0) == pytest.approx(1.5), "it falls while nothing comes"


def test_a_failure_that_loses_steps_begins_the_speed_anew():
    speed = Speed()
    for second, step in ((0, 100), (1, 110), (2, 90)):
        speed.add(at(step), second)
    assert speed.steps_per_s(2.0) is None
    speed.add(at(95), 3)
    assert speed.steps_per_s(3.0) == pytest.approx(5.0)


def test_a_curve_goes_from_the_lowest_to_the_highest_value():
    assert sparkline([4.0, 2.0, 0.5]) == "█▄▁"
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([1.0, float("nan"), float("inf"), 2.0]) == "▁!!█"
    assert sparkline([float("nan")]) == ""


def test_as_many_events_are_shown_as_fit():
    told = [Event(n, {"event": "start", "text": f"event {n}", "time": 0.0}) for n in range(100)]
    speed = Speed()
    for second, loss in enumerate((3.0, 2.0)):
        speed.add(at(second, loss), second)
    console = Console(width=200)
    with console.capture() as text:
        console.print(screen(JOB, speed, told, height=40))
    lines = text.get().splitlines()
    assert lines[0] == "job gpt: ACTIVE"
    assert any(line.startswith("speed") and line.endswith("loss █▁") for line in lines)
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
