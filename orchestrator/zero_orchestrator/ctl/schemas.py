"""JSON Schemas of what `zero-ctl --json` prints, made from the records in the code.

Must always hold: the schemas on docs/reference-json.md describe every key that is printed;
tests/unit/test_json_output.py compares them with the output of the commands.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Union, get_args, get_origin, get_type_hints

from zero_orchestrator.ctl.dashboard_command import Served
from zero_orchestrator.ctl.links import Link
from zero_orchestrator.ctl.logs_command import Line
from zero_orchestrator.ctl.metrics import Sample
from zero_orchestrator.ctl.requests import Outcome
from zero_orchestrator.ctl.stacks import RankStack
from zero_orchestrator.ctl.status import JobStatus

Schema = dict[str, Any]
DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SIMPLE: Mapping[Any, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    Any: {},
}


def schema_of(kind: Any, docs: Callable[[type[Any]], Mapping[str, str]]) -> Schema:
    """The schema of a type: a dataclass, or what its fields are made of.

    Args:
        kind: The type.
        docs: Returns the docstrings below the attributes of a class.

    Raises:
        TypeError: JSON has no such type.
    """
    if kind in _SIMPLE:
        return dict(_SIMPLE[kind])
    if inspect.isclass(kind) and issubclass(kind, StrEnum):
        return {"enum": [one.value for one in kind]}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _object(kind, docs)
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(one, docs) for one in inner]}
    if origin is tuple and inner[1:] == (...,):
        return {"type": "array", "items": schema_of(inner[0], docs)}
    if origin in (dict, Mapping) and inner[0] is str:
        return {"type": "object", "additionalProperties": schema_of(inner[1], docs)}
    raise TypeError(f"no JSON Schema for {kind}")


def _object(kind: type[Any], docs: Callable[[type[Any]], Mapping[str, str]]) -> Schema:
    hints, meanings = get_type_hints(kind), docs(kind)
    properties = {}
    for field in dataclasses.fields(kind):
        about = {"description": meanings[field.name]} if field.name in meanings else {}
        properties[field.name] = {**about, **schema_of(hints[field.name], docs)}
    return {"type": "object", "required": list(properties), "properties": properties}


def outputs(docs: Callable[[type[Any]], Mapping[str, str]]) -> Mapping[str, tuple[str, Schema]]:
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
