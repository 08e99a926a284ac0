"""What tests need to compare the JSON Schemas of the site with what commands print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def schemas(outputs: Mapping[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Command -> the schema of what it prints."""
    return {name: schema for names, (_, schema) in outputs.items() for name in names.split(", ")}


def closed(schema: Any) -> Any:
    """The same schema, which allows no key that it does not name."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    return {**found, "additionalProperties": False} if "properties" in schema else found
