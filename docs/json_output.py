"""The pages with the JSON Schemas of what commands print with `--json`, made from their records.

The site alone has them (`conf.py`). Must always hold: a schema names every key that is printed;
test_json_output.py of both programs compare.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_type_hints

import msgspec

from docs.writing import attribute_docs, page
from zero_checkpoint.tools.describe import Description
from zero_checkpoint.tools.listing import ListedCheckpoint
from zero_checkpoint.tools.records import (
    Compared,
    Exported,
    Failed,
    Imported,
    Tidied,
    Verified,
)
from zero_orchestrator.ctl.dashboard_command import Served
from zero_orchestrator.ctl.logs_command import LogLine
from zero_orchestrator.ctl.requests import Answered
from zero_orchestrator.observe.links import Link
from zero_orchestrator.observe.metrics import Sample
from zero_orchestrator.observe.stacks import RankStack
from zero_orchestrator.observe.status import JobStatus

Schema = dict[str, Any]
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_CKPT = """# JSON output of zero-ckpt

With `--json`, `zero-ckpt` prints one JSON document on stdout, and nothing for people there. A later
version may add keys, and values to an `enum`: a program must ignore what it does not know. Numbers
that are not finite are strings. After an error, the document is that of [an error](#an-error), and
the [exit code](exit-codes.md#zero-ckpt) tells it from the others.
"""
_CTL = """# JSON output

With `--json`, `zero-ctl` prints JSON for other programs: one object a line on stdout. Sentences
for people go to stderr. A later version may add keys, and values to an `enum`: a program must
ignore what it does not know. An error is a message on stderr and an
[exit code](exit-codes.md#zero-ctl). `top` and `metrics --port` print no JSON.
"""


def ctl() -> Mapping[str, tuple[str, Schema]]:
    """Each kind of output of `zero-ctl`: the commands that print it, its meaning and its schema."""
    return {
        "status, jobs": (
            "one object for each job, and a new one after each change with `--watch`.",
            _schema(JobStatus),
        ),
        "events": (
            "one object for each event. [Events](reference-events.md) lists the events, and the "
            "further keys of each.",
            _EVENT,
        ),
        "logs": ("one object for each line.", _schema(LogLine)),
        "stack": ("one object for each worker.", _schema(RankStack, "job", "round")),
        "probe": (
            "one object for each link between two nodes, in each direction.",
            _schema(Link, "job"),
        ),
        "dashboard": ("one object when it begins to listen.", _schema(Served)),
        "metrics": (
            "one object for each sample. [Metrics](reference-metrics.md) lists the metrics.",
            _schema(Sample),
        ),
        "drain, stop, exclude, include, gc, report": (
            "one object for each sentence, which stderr has as well.",
            _schema(Answered),
        ),
    }


def ckpt() -> Mapping[str, tuple[str, Schema]]:
    """The same of `zero-ckpt`."""
    records: Mapping[str, tuple[str, Any]] = {
        "ls": ("a list with an object for each checkpoint, newest first.", list[ListedCheckpoint]),
        "show": ("an object. `run` has what the engine noted of the training.", Description),
        "verify": ("a list with an object for each checkpoint.", list[Verified]),
        "diff": ("an object.", Compared),
        "export": ("an object.", Exported),
        "import": ("an object.", Imported),
        "prune, repair": ("an object.", Tidied),
        "an error": ("An object, in the place of what the command would have printed.", Failed),
    }
    return {
        commands: (meaning, _with_strings(_schema(kind)))
        for commands, (meaning, kind) in records.items()
    }


def ctl_page() -> str:
    """What `zero-ctl --json` prints."""
    return page(_CTL.rstrip(), *_sections("zero-ctl", ctl()))


def ckpt_page() -> str:
    """What `zero-ckpt --json` prints."""
    return page(_CKPT.rstrip(), *_sections("zero-ckpt", ckpt()))


PAGES = {"reference-ckpt-json.md": ckpt_page, "reference-json.md": ctl_page}
"""Page -> what makes it."""


def _sections(program: str, outputs: Mapping[str, tuple[str, Schema]]) -> Iterator[str]:
    for title, (meaning, schema) in outputs.items():
        names = ", ".join(f"`{program} {name}`" for name in title.split(", "))
        text = meaning if title == "an error" else f"{names}: {meaning}"
        shown = json.dumps({"$schema": _DIALECT, **schema}, indent=2)
        yield from (f"\n## {title}\n", f"{text}\n", "```json", shown, "```")


def _schema(kind: Any, *added: str) -> Schema:
    """The schema of a type, in which every key is there; `added`: by the command, in front."""
    (top,), parts = msgspec.json.schema_components(
        (kind,), schema_hook=lambda _: {"type": "string"}, ref_template="#/$defs/{name}"
    )
    for one in _records(kind):
        part, meanings = parts[one.__name__], attribute_docs(one)
        for name, field in part["properties"].items():
            field.pop("default", None)
            part["properties"][name] = (
                {"description": meanings[name], **field} if name in meanings else field
            )
        part["required"] = list(part["properties"])
    whole = parts.pop(kind.__name__) if isinstance(kind, type) else top
    if added:
        whole["properties"] = {name: _ADDED[name] for name in added} | whole["properties"]
        whole["required"] = list(whole["properties"])
    return {**whole, "$defs": parts} if parts else whole


def _records(kind: Any) -> Iterator[type[Any]]:
    """The dataclasses that a type is made of."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        yield kind
        for hint in get_type_hints(kind).values():
            yield from _records(hint)
    for inner in get_args(kind):
        yield from _records(inner)


def _with_strings(schema: Any) -> Any:
    """The schema of an output whose numbers are strings where they are not finite."""
    if isinstance(schema, list):
        return [_with_strings(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "number":
        rest = {key: value for key, value in schema.items() if key != "type"}
        return {**rest, "anyOf": [{"type": "number"}, {"enum": ["inf", "-inf", "nan"]}]}
    return {key: _with_strings(value) for key, value in schema.items()}


_ADDED: Mapping[str, Schema] = {
    "job": {"description": "Name of the job.", "type": "string"},
    "round": {"description": "Round of the job.", "type": "integer"},
}
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
