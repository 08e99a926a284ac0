"""What a command prints with `--json`: its lines, and JSON Schemas made from its dataclasses.

`zero_orchestrator.ctl.schemas` and `zero_checkpoint.tools.schemas` name the records; the pages of
docs/ show the schemas.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import types
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Union, get_args, get_origin, get_type_hints

Schema = dict[str, Any]
Docs = Callable[[type[Any]], Mapping[str, str]]
"""Returns the docstrings below the attributes of a class."""
DIALECT = "https://json-schema.org/draft/2020-12/schema"
SIMPLE: Mapping[Any, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    Any: {},
}


def schema_of(kind: Any, docs: Docs, simple: Mapping[Any, Schema] = SIMPLE) -> Schema:
    """The schema of a type: a dataclass, or what its fields are made of.

    Args:
        kind: The type.
        docs: Returns the docstrings below the attributes of a class.
        simple: The schemas of the types that are made of no others.

    Raises:
        TypeError: JSON has no such type.
    """

    def inside(one: Any) -> Schema:
        return schema_of(one, docs, simple)

    if kind in simple:
        return dict(simple[kind])
    if inspect.isclass(kind) and issubclass(kind, StrEnum):
        return {"enum": [one.value for one in kind]}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _object(kind, docs, simple)
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        schemas = [inside(one) for one in inner]
        different = [one for at, one in enumerate(schemas) if one not in schemas[:at]]
        return {"anyOf": different} if len(different) > 1 else different[0]
    if origin is list or (origin is tuple and inner[1:] == (...,)):
        return {"type": "array", "items": inside(inner[0])}
    if origin in (dict, Mapping) and issubclass(inner[0], str):
        return {"type": "object", "additionalProperties": inside(inner[1])}
    raise TypeError(f"no JSON Schema for {kind}")


def _object(kind: type[Any], docs: Docs, simple: Mapping[Any, Schema]) -> Schema:
    hints, meanings = get_type_hints(kind), docs(kind)
    properties = {}
    for field in dataclasses.fields(kind):
        about = {"description": meanings[field.name]} if field.name in meanings else {}
        properties[field.name] = {**about, **schema_of(hints[field.name], docs, simple)}
    return {"type": "object", "required": list(properties), "properties": properties}


def line_of(record: Mapping[str, Any]) -> str:
    """A record as one line of JSON, which has no NaN and no infinity: those become null."""
    try:
        return json.dumps(record, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(record))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
