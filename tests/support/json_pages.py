"""The JSON Schemas on a page of docs/, and what tests need to compare them with output."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def schemas_on(page: str) -> dict[str, Any]:
    """Command -> the schema of what it prints."""
    text = (DOCS / page).read_text()
    blocks = re.findall(r"^## (.*?)\n.*?```json\n(.*?)```", text, re.DOTALL | re.MULTILINE)
    return {name: json.loads(schema) for names, schema in blocks for name in names.split(", ")}


def closed(schema: Any) -> Any:
    """The same schema, which allows no key that it does not name."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    return {**found, "additionalProperties": False} if "properties" in schema else found
