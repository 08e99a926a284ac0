"""Which events of a job a user asks for, and what belongs to one recovery."""

import json
import time
from dataclasses import replace

import pytest

from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from zero_orchestrator.ctl import cli, events_command
from zero_orchestrator.ctl.views import JsonView
from zero_orchestrator.errors import SpecError
from zero_orchestrator.observe.events import Event, events_prefix
from zero_orchestrator.observe.metrics import exposition, of_jobs
from zero_orchestrator.observe.story import recoveries, selected

TOLD = [
    ("a", 1, "activate"),
    ("a", 1, "start"),
    ("b", 1, "start"),
    ("b", 1, "health"),
    ("a", 1, "exit"),
    ("a", 1, "dead"),
    ("a", 1, "interrupt"),
    ("a", 1, "stop"),
    ("a", 2, "activate"),
    ("a", 2, "start"),
    ("a", 2, "commit"),
    ("a", 2, "yield"),
    ("a", 2, "form"),
]
EVENTS = [
    Event(i, {"time": 100.0 + i, "node": node, "round": number, "event": event, "text": ""})
    for i, (node, number, event) in enumerate(TOLD)
]


def test_events_are_selected_by_node_and_by_time():
    assert [event.revision for event in selected(EVENTS, node="b")] == [2, 3]
    assert [event.revision for event in selected(EVENTS, since_s=111.0)] == [11, 12]
    assert list(selected(EVENTS)) == EVENTS


def test_a_recovery_is_from_the_first_sign_of_the_failure_to_the_start_of_the_workers():
    first, second = recoveries(EVENTS)
    assert first.round == 1
    assert [event.revision for event in first.events] == [4, 5, 6, 7, 8, 9]
    assert first.offsets_s == (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
    assert [event.revision for event in second.events] == [11, 12]  # it has not ended yet
    assert (first.cause, first.detection_s, first.took_s) == ("exit", 2.0, 5.0)
    assert (second.cause, second.detection_s, second.took_s) == ("yield", 1.0, None)


def test_a_recovery_lasts_from_the_last_finished_step_where_steps_are_reported():
    """A stopped process is noticed late: what comes before the first sign is lost as well."""
    told = [
        replace(event, record={**event.record, "idle_s": 5.3})
        if event.record["event"] == "interrupt"
        else event
        for event in EVENTS
    ]
    first = recoveries(told)[0]
    assert first.from_s == pytest.approx(106.0 - 5.3)
    assert (first.detection_s, first.took_s) == (pytest.approx(5.3), pytest.approx(8.3))
    assert first.offsets_s[0] == 0.0, "the list of events begins with the first sign"


def test_workers_that_are_asked_to_leave_train_until_they_have_left():
    told = [
        replace(event, record={**event.record, "idle_s": 0.25})
        if event.record["event"] == "form"
        else event
        for event in EVENTS
    ]
    second = recoveries(told)[1]
    assert second.cause == "yield"
    assert (second.from_s, second.detection_s) == (112.0 - 0.25, 0.25)


def test_the_metrics_of_a_job_have_its_recoveries_by_cause():
    text = exposition(lambda: of_jobs([], {"gpt": recoveries(EVENTS)})).decode()
    assert 'zero_job_recoveries{cause="exit",zero_job="gpt"} 1.0' in text
    assert 'zero_job_recoveries{cause="yield",zero_job="gpt"} 1.0' in text
    assert 'zero_job_last_detection_seconds{cause="yield",zero_job="gpt"} 1.0' in text
    assert "zero_job_last_recovery_seconds{" not in text  # the last one has not ended
    first = exposition(lambda: of_jobs([], {"gpt": recoveries(EVENTS)[:1]})).decode()
    assert 'zero_job_last_recovery_seconds{cause="exit",zero_job="gpt"} 5.0' in first


def test_events_whose_cause_was_trimmed_or_that_are_unreadable_are_no_obstacle():
    trimmed = [Event(1, {"event": "?", "text": "{"}), *EVENTS[6:8]]
    (only,) = recoveries(trimmed)
    assert [event.revision for event in only.events] == [6, 7]
    assert recoveries([]) == ()


def ask(capsys, *flags: str) -> list[dict]:
    """What `zero-ctl events gpt` prints with these flags and --json, of a job with `EVENTS`."""
    store, now_s = MemoryStore(ManualClock()), time.time()
    for event in EVENTS:
        record = {**event.record, "time": now_s - 1000 + event.record["time"]}
        store.put(f"{events_prefix('gpt')}a.1.{event.revision:06d}", json.dumps(record))
    args = cli.make_parser().parse_args(["events", "gpt", "--json", *flags])
    events_command.run(args, store, JsonView())
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_flags_of_events_select_what_is_printed(capsys):
    assert len(ask(capsys)) == len(EVENTS)
    assert [event["event"] for event in ask(capsys, "--node=b")] == ["start", "health"]
    assert [event["event"] for event in ask(capsys, "--since=889.5")] == ["yield", "form"]
    assert [e["offset_s"] for e in ask(capsys, "--recovery=2")] == [0, 1, 2, 3, 4, 5]
    assert [e["event"] for e in ask(capsys, "--recovery")] == ["yield", "form"]
    assert ask(capsys, "--recovery=3") == []


def test_a_recovery_is_shown_whole(capsys):
    with pytest.raises(SpecError, match="leave out the other flags"):
        ask(capsys, "--recovery", "--follow")
