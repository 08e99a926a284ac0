"""OTLP traces: what a collector receives of recoveries and saves, and what happens without one."""

from __future__ import annotations

import json
import logging
import time

import pytest

from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from tests.support.ports import free_port
from tests.support.waiting import wait_for
from zero_agent.loop.observed import traces
from zero_agent.loop.observed.traces import Traces, refusal
from zero_contract.worker import Saved
from zero_orchestrator.observe.events import Event, events_prefix
from zero_orchestrator.observe.story import recoveries, spans

T0 = 1_795_446_000.0
TOLD = [
    (0.0, "b", 1, "exit", {}),
    (0.25, "a", 1, "dead", {}),
    (0.5, "a", 1, "interrupt", {"text": "lost node c; restart 1 of 3"}),
    (1.25, "b", 2, "activate", {}),
    (1.5, "a", 2, "start", {}),
    (1.75, "b", 2, "start", {}),
    (4.0, "a", 2, "restore", {"load_s": 1.5}),
]
PARTS = [
    ("detection", 0.0, 0.5),
    ("meeting", 0.5, 0.75),
    ("starting", 1.25, 1.25),
    ("loading", 2.5, 1.5),
    ("first step", 4.0, 2.0),
]


def told(*more: tuple) -> list[Event]:
    return [
        Event(n, {"time": T0 + at_s, "node": node, "round": of, "event": kind, "text": "", **facts})
        for n, (at_s, node, of, kind, facts) in enumerate([*TOLD, *more], 1)
    ]


def parts(events: list[Event], first_step_s: float) -> list[tuple[str, float, float]]:
    (found,) = recoveries(events)
    return [
        (one.name, one.from_s - T0, one.to_s - one.from_s)
        for one in spans(found, T0 + first_step_s)
    ]


def test_a_recovery_has_five_parts_without_gaps():
    assert parts(told(), 6.0) == PARTS


def test_a_part_whose_events_are_not_kept_belongs_to_the_next_one():
    cold = [event for event in told() if event.record["event"] != "restore"]
    assert parts(cold, 6.0)[2:] == [("starting", 1.25, 0.5), ("first step", 1.75, 4.25)]
    large = [event for event in cold if event.record["event"] != "start"]
    assert parts(large, 6.0)[1:] == [("meeting", 0.5, 0.75), ("first step", 1.25, 4.75)]


def test_clocks_that_differ_give_no_part_a_negative_length():
    late = [Event(e.revision, dict(e.record)) for e in told()]
    late[3].record["time"] = T0 + 0.1  # the clock of b is slow
    found = parts(late, 3.0)
    assert [name for name, _, _ in found] == [name for name, _, _ in PARTS]
    assert all(took_s >= 0 for _, _, took_s in found)
    assert sum(took_s for _, _, took_s in found) == 3.0


SAVED = Saved(
    step=40,
    committed=True,
    began_s=T0,
    stall_s=0.25,
    write_s=1.5,
    written_s=2.0,
    publish_s=0.5,
    published_s=3.0,
    total_s=3.25,
    whole_bytes=1 << 20,
)


@pytest.fixture
def store() -> MemoryStore:
    made = MemoryStore(ManualClock())
    for event in told():
        made.put(f"{events_prefix('gpt')}a.1.{event.revision:06d}", json.dumps(event.record))
    return made


def test_a_collector_receives_each_recovery_and_each_save_once(store, monkeypatch):
    otlp = pytest.importorskip("tests.support.otlp")
    with otlp.collector() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.url)
        sender = Traces("gpt", "a", store, {"OTEL_EXPORTER_OTLP_ENDPOINT": received.url}, 0.0)
        sender.stepped(1, T0 - 9.0)  # the first round is no recovery
        for step in range(3):
            sender.stepped(2, T0 + 6.0 + step)
        sender.saved(SAVED)
        wait_for(lambda: len(received.requests) == 2, 60, "both traces")
        sender.close()
    assert received.tree() == {
        "recovery": [("", 0.0, 6.0), *PARTS],
        "save": [("", 0.0, 3.25), ("stall", 0.0, 0.25), ("write", 0.5, 1.5), ("publish", 2.5, 0.5)],
    }
    recovery, save = (span for span in received.spans if not span.parent_span_id)
    assert recovery.start_time_unix_nano == T0 * 1e9
    assert recovery.trace_id != save.trace_id
    facts = {one.key: one.value for one in recovery.attributes}
    assert facts["zero.cause"].string_value == "exit"
    assert facts["zero.reason"].string_value == "lost node c; restart 1 of 3"
    assert (facts["zero.round"].int_value, facts["zero.failure"].bool_value) == (1, True)
    assert save.status.code == 0
    for resource in received.resources:
        assert (resource["service.name"], resource["zero.job"]) == ("zero-elastic", "gpt")


def test_without_an_endpoint_nothing_is_made(store):
    sender = Traces("gpt", "a", store, {})
    sender.stepped(2, T0)
    sender.saved(SAVED)
    assert (sender._thread, sender._queue.qsize()) == (None, 0)
    sender.close()


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"}, ""),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "no traces are sent: OTEL_EXPORTER_OTLP_PROTOCOL is grpc, and agents send them by "
            "http/protobuf, to port 4318 of most collectors; set "
            "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf and OTEL_EXPORTER_OTLP_ENDPOINT",
        ),
    ],
)
def test_what_the_environment_asks_for(environ, why):
    assert refusal(environ) == why


def test_a_missing_extra_is_one_message_that_names_it(store, monkeypatch, caplog):
    monkeypatch.setattr(traces, "_EXPORTER", "no_such_package.exporter")
    environ = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}
    sender = Traces("gpt", "a", store, environ)
    sender.saved(SAVED)
    sender.close()
    assert caplog.messages == [
        "no traces are sent, although OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set: opentelemetry is "
        "not installed: pip install 'zero-elastic[traces]'"
    ]


def test_a_collector_that_cannot_be_reached_is_said_once_and_delays_nobody(
    store, monkeypatch, caplog
):
    pytest.importorskip("opentelemetry.exporter.otlp")
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    for name, value in {**environ, "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}.items():
        monkeypatch.setenv(name, value)
    caplog.set_level(logging.WARNING)
    sender = Traces("gpt", "a", store, environ)
    began_s = time.monotonic()
    for _ in range(1000):
        sender.saved(SAVED)
    assert time.monotonic() - began_s < 1.0
    wait_for(lambda: caplog.messages, 60, "the message")
    began_s = time.monotonic()
    sender.close()
    assert time.monotonic() - began_s < traces.CLOSE_S + 1.0
    assert caplog.messages == [
        "traces are not sent, and the job goes on without: the collector does not answer, or "
        "refuses them"
    ]
