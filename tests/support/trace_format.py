"""The trace event format of Chrome and Perfetto, as far as this project writes it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import jsonschema

_TIME = {"type": "integer"}
_OF_ALL = {
    "pid": {"type": "integer", "minimum": 0},
    "tid": {"type": "integer", "minimum": 0},
    "name": {"type": "string"},
}


def _event(kind: str, **more: Any) -> dict[str, Any]:
    known = {"ph": {"const": kind}, **_OF_ALL, **more}
    required = list(known)
    return {"properties": known, "required": required, "additionalProperties": False}


_NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "traceEvents": {
            "type": "array",
            "items": {
                "type": "object",
                "oneOf": [
                    _event("X", ts=_TIME, dur={**_TIME, "minimum": 0}, args={"type": "object"}),
                    _event("i", ts=_TIME, s={"enum": ["g", "p", "t"]}, args={"type": "object"}),
                    _event("M", args=_NAME),
                ],
            },
        },
        "displayTimeUnit": {"enum": ["ms", "ns"]},
    },
    "required": ["traceEvents"],
    "additionalProperties": False,
}


Slice = tuple[str, int, int]
"""Name, begin and end in microseconds."""


def slices(trace: dict[str, Any]) -> dict[tuple[str, str], list[Slice]]:
    """The slices of a valid trace, by the names of process and thread, in order.

    Raises:
        AssertionError: Two of a thread overlap, or a thread has no name.
    """
    jsonschema.validate(trace, SCHEMA)
    names: dict[tuple[str, int, int], str] = {}
    found = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "M":
            names[event["name"], event["pid"], event["tid"]] = event["args"]["name"]
    for event in trace["traceEvents"]:
        at = event["pid"], event["tid"]
        thread = names["process_name", *at], names["thread_name", *at]
        if event["ph"] == "X":
            found[thread].append((event["name"], event["ts"], event["ts"] + event["dur"]))
    for thread, of_thread in found.items():
        open_us: list[int] = []
        for name, from_us, to_us in sorted(of_thread, key=lambda one: (one[1], -one[2])):
            while open_us and open_us[-1] <= from_us:
                open_us.pop()
            assert not open_us or to_us <= open_us[-1], f"{thread}: {name} overlaps"
            open_us.append(to_us)
    return dict(found)
