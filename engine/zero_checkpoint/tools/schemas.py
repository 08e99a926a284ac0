"""JSON Schemas of what `zero-ckpt --json` prints, made from the records in the code.

Must always hold: the schemas on docs/reference-ckpt-json.md describe every key that is printed;
tests/unit/checkpoint/test_json_output.py compares them with the output of the commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_checkpoint.files.objects import ObjectPath
from zero_checkpoint.tools.describe import Description
from zero_checkpoint.tools.listing import Row
from zero_checkpoint.tools.records import (
    Compared,
    Exported,
    Failed,
    Imported,
    Tidied,
    Verified,
)
from zero_contract.schemas import SIMPLE, Docs, Schema, schema_of

_SIMPLE: Mapping[Any, Schema] = {
    **SIMPLE,
    float: {"anyOf": [{"type": "number"}, {"enum": ["inf", "-inf", "nan"]}]},
    Path: {"type": "string"},
    ObjectPath: {"type": "string"},
}


def outputs(docs: Docs) -> Mapping[str, tuple[str, Schema]]:
    """Each kind of output: the commands that print it, its meaning and its schema."""
    records: Mapping[str, tuple[str, Any]] = {
        "ls": ("a list with an object for each checkpoint, newest first.", list[Row]),
        "show": ("an object. `run` has what the engine noted of the training.", Description),
        "verify": ("a list with an object for each checkpoint.", list[Verified]),
        "diff": ("an object.", Compared),
        "export": ("an object.", Exported),
        "import": ("an object.", Imported),
        "prune, repair": ("an object.", Tidied),
    }
    return {
        commands: (meaning, schema_of(kind, docs, _SIMPLE))
        for commands, (meaning, kind) in records.items()
    }


def error(docs: Docs) -> Schema:
    """The schema of what is printed of a command that was not carried out."""
    return schema_of(Failed, docs, _SIMPLE)
