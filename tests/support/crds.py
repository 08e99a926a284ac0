"""The schemas of the custom resources that the manifests have, as strict as an API server.

`tests/data/kubernetes/crds.json.gz` has them without their descriptions: of Kubeflow Trainer
(commit 8c0f5059), JobSet (08dfbdfd) and Kueue (ff69552e), all of August 2026. What a schema does
not name is refused, as by `kubectl apply --validate=strict`. What it does not check: rules in CEL,
and what the projects' webhooks refuse.
"""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path
from typing import Any

import jsonschema

_FILE = Path(__file__).resolve().parents[1] / "data" / "kubernetes" / "crds.json.gz"

Object = dict[str, Any]


@functools.cache
def _schemas() -> dict[str, Object]:
    """`GROUP/VERSION KIND` -> its schema."""
    return {
        key: _strict(one) for key, one in json.loads(gzip.decompress(_FILE.read_bytes())).items()
    }


def _strict(schema: Object) -> Object:
    """The same schema, of JSON Schema, that refuses properties without a name."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    found = dict(schema)
    if "properties" in found:
        found["properties"] = {name: _strict(one) for name, one in found["properties"].items()}
        if not found.get("x-kubernetes-preserve-unknown-fields"):
            found["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if isinstance(found.get(key), dict):
            found[key] = _strict(found[key])
    return found


def knows(one: Object) -> bool:
    """Whether there is a schema for the kind of this object."""
    return f"{one['apiVersion']} {one['kind']}" in _schemas()


def complaints(one: Object) -> list[str]:
    """What an API server would say against this object, with the path to each place."""
    schema = _schemas()[f"{one['apiVersion']} {one['kind']}"]
    bare = {key: value for key, value in one.items() if key != "metadata"}
    errors = jsonschema.Draft7Validator(schema).iter_errors(bare)
    return [f"{error.json_path}: {error.message}" for error in errors]
