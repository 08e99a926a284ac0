"""JSON Schemas of what `zero-ctl --json` prints, made from the records in the code.

Must always hold: the schemas on docs/reference-json.md describe every key that is printed;
tests/unit/test_json_output.py compares them with the output of the commands.
"""

from __future__ import annotations

from collections.abc import Mapping

from zero_contract.schemas import Docs, Schema, schema_of
from zero_orchestrator.ctl.dashboard_command import Served
from zero_orchestrator.ctl.logs_command import Line
from zero_orchestrator.ctl.requests import Outcome
from zero_orchestrator.observe.links import Link
from zero_orchestrator.observe.metrics import Sample
from zero_orchestrator.observe.stacks import RankStack
from zero_orchestrator.observe.status import JobStatus


def outputs(docs: Docs) -> Mapping[str, tuple[str, Schema]]:
    """Each kind of output: the commands that print it, its meaning and its schema."""
    return {
        "status, jobs": (
            "one object for each job, and a new one after each change with `--watch`.",
            schema_of(JobStatus, docs),
        ),
        "events": (
            "one object for each event. [Events](reference-events.md) lists the events, and the "
            "further keys of each.",
            _EVENT,
        ),
        "logs": ("one object for each line.", schema_of(Line, docs)),
        "stack": ("one object for each worker.", _with(schema_of(RankStack, docs), "job", "round")),
        "probe": (
            "one object for each link between two nodes, in each direction.",
            _with(schema_of(Link, docs), "job"),
        ),
        "dashboard": ("one object when it begins to listen.", schema_of(Served, docs)),
        "metrics": (
            "one object for each sample. [Metrics](reference-metrics.md) lists the metrics.",
            schema_of(Sample, docs),
        ),
        "drain, stop, exclude, include, gc, report": (
            "one object for each sentence, which stderr has as well.",
            schema_of(Outcome, docs),
        ),
    }


_ADDED: Mapping[str, Schema] = {
    "job": {"description": "Name of the job.", "type": "string"},
    "round": {"description": "Round of the job.", "type": "integer"},
}
"""What a command adds to a record of the code."""


def _with(schema: Schema, *names: str) -> Schema:
    properties = {**{name: _ADDED[name] for name in names}, **schema["properties"]}
    return {**schema, "required": list(properties), "properties": properties}


_EVENT: Schema = {
    "type": "object",
    "required": ["revision", "event", "text"],
    "properties": {
        "revision": {
            "description": "Revision of etcd: events are in this order.",
            "type": "integer",
        },
        "time": {
            "description": "Clock of the node, in seconds since the epoch.",
            "type": "number",
        },
        "node": {"description": "Node that wrote the event.", "type": "string"},
        "round": {"description": "Round of the job.", "type": "integer"},
        "event": {"description": "Short name of the event.", "type": "string"},
        "text": {"description": "The event in words, with its cause.", "type": "string"},
        "offset_s": {
            "description": "With `--recovery`: seconds since the first event of the recovery.",
            "type": "number",
        },
    },
}
