"""Records as agents of an older and of a newer version write them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from zero_orchestrator.membership.dead_links import LinkReport, SetAside
from zero_orchestrator.membership.failures import Charge, Exclusion
from zero_orchestrator.membership.job_state import DrainOrder, Failure, Head, Node, Published
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.store.kv import Put, Write

Change = Callable[[Any], Any]
"""From a record of this version to the same of another one."""

OLD = {
    Node: {"id", "incarnation", "address", "slots", "draining", "protocol"},
    JobSpec: {"min_nodes", "max_nodes", "max_restarts", "command", "protocol"},
    Failure: {"node", "symptom", "summary"},
    DrainOrder: {"node", "incarnation", "by"},
    Charge: {"n", "cause"},
    Exclusion: {"host", "why"},
    Head: {"n", "state", "cause", "failed"},
    Published: {"step", "tag", "digest", "samples"},
    LinkReport: {"node", "dead"},
    SetAside: {"node", "why", "others"},
}
"""The fields of the first version that speaks this protocol: every reader may count on them."""


def older(record: Any) -> Any:
    """A record as an agent writes it that knows the first fields alone."""
    if not isinstance(record, dict):
        return record
    if "fields" in record:  # the members of a round, one row for each
        kept = [i for i, name in enumerate(record["fields"]) if name in OLD[Node]]
        rows = [[row[i] for i in kept] for row in record["nodes"]]
        return {**record, "fields": [record["fields"][i] for i in kept], "nodes": rows}
    for kind, first in OLD.items():
        if record.keys() == {field.name for field in dataclasses.fields(kind)}:
            return {name: value for name, value in record.items() if name in first}
    return record


def newer(record: Any) -> Any:
    """A record as an agent writes it that knows one more field of everything."""
    if not isinstance(record, dict):
        return record
    if "fields" in record:
        rows = [[*row, "new"] for row in record["nodes"]]
        return {**record, "fields": [*record["fields"], "later"], "nodes": rows, "also": 1}
    return {**record, "later": "new"}


def in_words_of(change: Change, value: str) -> str:
    """The value of a key as the other version writes it."""
    try:
        record = json.loads(value)
    except ValueError:
        return value
    return json.dumps(change(record)) if isinstance(record, dict) else value


def written_by(change: Change, write: Write) -> Write:
    """What the other version writes."""
    if isinstance(write, Put):
        return dataclasses.replace(write, value=in_words_of(change, write.value))
    return write
