"""What `zero-ctl --json` prints is what the page of the site says: every key, and no other."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from docs.json_output import ctl
from tests.support.json_pages import closed, schemas
from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from tests.support.written_job import Job
from zero_agent.loop.answers import Answers
from zero_contract.journal import Journal
from zero_orchestrator.ctl import cli
from zero_orchestrator.ctl.views import JsonView
from zero_orchestrator.errors import SpecError
from zero_orchestrator.observe import status
from zero_orchestrator.observe.events import events_prefix, progress_prefix

SCHEMAS = schemas(ctl())
CHUNK = {"number": 1, "time": 1.5, "round": 3, "rank": 0, "stream": "stdout", "text": "a\nb\n"}
STACK = 'Thread 0x01 (most recent call first):\n  File "/x.py", line 7 in f\n'
RANKS = [{"rank": 0, "pid": 7, "text": STACK}, {"rank": 1, "pid": 8, "problem": "gone"}]


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    """A job that runs on two nodes, with all that a job can have."""
    made = MemoryStore(ManualClock())
    job = Job(made)
    job.live("abc")
    job.round(3, "ACTIVE", "ab")
    latest = {"step": 5, "samples": 40, "tag": "t", "digest": "d", "time": 1.5}
    made.put(job.keys.latest, json.dumps(latest))
    made.put(job.keys.excluded("host"), json.dumps({"host": "host", "why": "me", "for_s": 0}))
    progress = {"step": 7, "loss": 1.25, "time": 2.0, "ram": {"used_bytes": 1, "budget_bytes": 2}}
    made.put(progress_prefix("gpt") + "a", json.dumps(progress))
    event = {"time": 1.0, "node": "a", "round": 3, "event": "start", "text": "x"}
    made.put(events_prefix("gpt") + "a.1.1", json.dumps(event))
    kinds = {
        "stack": lambda query: {"host": "h", "ranks": RANKS},
        "logs": lambda query: {"agent": "1", "chunks": [CHUNK], "number": 1, "lost": False},
        "probe": lambda query: {"latency_s": 0.001, "bytes_per_s": 1e9},
    }
    agents = [Answers(made, "gpt", node, kinds) for node in "abc"]
    yield made
    for agent in agents:
        agent.close()


def commands() -> dict[str, argparse.ArgumentParser]:
    """Those that print JSON."""
    groups = cli.make_parser()._subparsers._group_actions  # type: ignore[union-attr]
    found = groups[0].choices.items()
    return {name: one for name, one in found if "--json" in one._option_string_actions}


def test_every_command_that_prints_json_is_on_the_page():
    assert set(SCHEMAS) == set(commands()) - {"top"}
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("status gpt", 1),
        ("jobs", 1),
        ("events gpt", 1),
        ("logs gpt", 6),
        ("stack gpt", 4),
        ("probe gpt", 2),
        ("metrics gpt", None),
        ("drain a gpt", 1),
        ("drain b gpt --wait=0.1", 2),
        ("exclude c gpt", 1),
        ("include host gpt", 1),
        ("stop gpt", 1),
    ],
)
def test_what_is_printed_has_the_keys_of_the_page_and_no_other(store, capsys, line, count):
    args = cli.make_parser().parse_args([*line.split(), "--json"])
    cli._COMMANDS[args.command](args, store, JsonView())
    found = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert len(found) == count if count else found
    schema = closed(SCHEMAS[args.command])
    for record in found:
        jsonschema.validate(record, schema, cls=jsonschema.Draft202012Validator)


def test_a_loss_that_is_not_finite_is_null_and_no_change_in_itself(store, capsys):
    """JSON has no NaN: most parsers refuse the line, and a watch would print it each second."""
    store.put(progress_prefix("gpt") + "a", json.dumps({"step": 7, "loss": math.nan, "time": 2.0}))
    JsonView().watch(status.read(store, "gpt") for _ in range(3))
    (line,) = capsys.readouterr().out.splitlines()
    assert "NaN" not in line
    assert [row["loss"] for row in json.loads(line)["members"]] == [None, None]


def strict(text: str) -> Any:
    """What a reader other than Python's makes of a text: NaN and infinities are no JSON."""
    return json.loads(text, parse_constant=lambda token: pytest.fail(f"{token} is no JSON"))


def test_no_number_that_an_event_holds_makes_the_files_of_a_job_unreadable(store, tmp_path, capsys):
    """Perfetto refuses a trace with one NaN as a whole."""
    odd = {"factor": math.nan, "ranks": [math.inf, -math.inf], "time": 2.0}
    with contextlib.closing(Journal("a", tmp_path / "logs/gpt/events-a.jsonl")) as journal:
        journal.tell("start", "a begins", round=2, **odd)
        journal.tell("interrupt", "a broke", round=2, **odd)
        journal.tell("first step", "a trains", round=3, **odd)
    (written,) = (tmp_path / "logs/gpt").iterdir()
    lines = written.read_text().splitlines()
    assert [(strict(line)["factor"], strict(line)["ranks"]) for line in lines] == 3 * [
        (None, [None, None])
    ]
    for at, line in enumerate(lines):
        record = json.loads(line) | odd  # as an older version has written it
        store.put(events_prefix("gpt") + f"a.2.{at}", json.dumps(record))
    for line in ("events gpt", f"report gpt -o {tmp_path}/r.html", "status gpt", "metrics gpt"):
        args = cli.make_parser().parse_args([*line.split(), "--json"])
        cli._COMMANDS[args.command](args, store, JsonView())
    assert all(map(strict, capsys.readouterr().out.splitlines()))
    found = strict((tmp_path / "r.trace.json").read_text())["traceEvents"]
    (failure,) = (one for one in found if one["name"] == "interrupt")
    assert (failure["args"]["factor"], failure["args"]["ranks"]) == (None, [None, None])


def test_what_gc_deletes_is_a_record(capsys):
    store = MemoryStore(ManualClock())
    Job(store).round(3, "DONE", "a")
    args = cli.make_parser().parse_args(["gc", "--keep=0", "--json", "--dry-run"])
    cli._COMMANDS["gc"](args, store, JsonView())
    (record,) = map(json.loads, capsys.readouterr().out.splitlines())
    jsonschema.validate(record, closed(SCHEMAS["gc"]), cls=jsonschema.Draft202012Validator)
    assert (record["job"], record["done"]) == ("gpt", False)


def test_a_report_is_a_record(store, capsys, tmp_path):
    line = f"report gpt --json -o {tmp_path}/r.html"
    args = cli.make_parser().parse_args(line.split())
    cli._COMMANDS["report"](args, store, JsonView())
    (record,) = map(json.loads, capsys.readouterr().out.splitlines())
    jsonschema.validate(record, closed(SCHEMAS["report"]), cls=jsonschema.Draft202012Validator)
    assert record["target"] == f"{tmp_path}/r.html"


@pytest.mark.parametrize("path", [".", "/", "./"])
def test_a_report_in_place_of_a_directory_is_refused(store, path):
    args = cli.make_parser().parse_args(["report", "gpt", "-o", path])
    with pytest.raises(SpecError, match="is a directory; name a file"):
        cli._COMMANDS["report"](args, store, JsonView())


def test_served_metrics_are_no_json(store, capsys):
    args = cli.make_parser().parse_args(["metrics", "--json", "--port=0"])
    with pytest.raises(SpecError, match="leave out one of the two"):
        cli._COMMANDS["metrics"](args, store, JsonView())
