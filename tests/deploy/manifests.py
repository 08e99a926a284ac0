"""Rendering the kustomizations of deploy/, and finding one's way in the objects."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.programs import works

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "kubernetes" / "base"
OVERLAYS = {path.name: path for path in sorted((DEPLOY / "kubernetes" / "overlays").iterdir())}
RENDERED = {"base": BASE, **OVERLAYS}

Object = dict[str, Any]
_RENDERERS = (["kubectl", "kustomize"], ["kustomize", "build"])
_UNITS = {"m": 1e-3, "": 1.0, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


@functools.cache
def _rendered_text(directory: Path) -> str:
    renderer = next((one for one in _RENDERERS if works(one[0])), None)
    if renderer is None:
        pytest.skip("rendering the overlays needs a kubectl or kustomize that works")
    done = subprocess.run(
        [*renderer, str(directory)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def render(directory: Path) -> list[Object]:
    """The objects a kustomization makes, as `kubectl apply -k` would send them."""
    return list(yaml.safe_load_all(_rendered_text(directory)))


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [one for one in objects if one["kind"] in kinds]


def named(objects: list[Object], kind: str, name: str) -> Object:
    """The one object of this kind and name."""
    found = [one for one in of_kind(objects, kind) if one["metadata"]["name"] == name]
    assert len(found) == 1, f"{kind}/{name}: {len(found)} of them"
    return found[0]


_TEMPLATES: dict[str, Callable[[Object], Object]] = {
    "JobSet": lambda one: one["spec"],
    "ClusterTrainingRuntime": lambda one: one["spec"]["template"]["spec"],
}
"""Kind -> the JobSet's spec in it."""


def jobs(objects: list[Object]) -> Iterator[Object]:
    """All Jobs, those that a JobSet or a TrainJob would create included."""
    yield from of_kind(objects, "Job")
    for owner in of_kind(objects, *_TEMPLATES):
        for one in _TEMPLATES[owner["kind"]](owner)["replicatedJobs"]:
            name = f"{owner['metadata']['name']}-{one['name']}-0"
            head = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}}
            sizes = {"parallelism": 2, "completions": 2}  # Trainer sets both
            yield head | {"spec": sizes | one["template"]["spec"]}


def workloads(objects: list[Object]) -> Iterator[Object]:
    """Everything with a pod template."""
    yield from of_kind(objects, "StatefulSet", "Deployment")
    yield from jobs(objects)


def pod(workload: Object) -> Object:
    """A workload's pod spec."""
    spec: Object = workload["spec"]["template"]["spec"]
    return spec


def containers(workload: Object) -> list[Object]:
    """A workload's containers, those of its start included."""
    return [*pod(workload).get("initContainers", []), *pod(workload)["containers"]]


def environment(objects: list[Object], container: Object) -> dict[str, str]:
    """A container's variables with a fixed value: its config maps', then its own."""
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        if "configMapRef" in source:
            found |= named(objects, "ConfigMap", source["configMapRef"]["name"])["data"]
    return found | {e["name"]: e["value"] for e in container.get("env", []) if "value" in e}


def agent_flags(objects: list[Object]) -> dict[str, str]:
    """The variables of the agents: `PET_<FLAG>` and others."""
    return environment(objects, containers(next(jobs(objects)))[0])


def quantity(text: str | float) -> float:
    """`"500m"` -> 0.5, `"4Gi"` -> 4 * 2**30."""
    match = re.fullmatch(r"([\d.]+)(m|Mi|Gi|Ti|)", str(text))
    assert match is not None, f"{text}: not a quantity these tests know"
    return float(match[1]) * _UNITS[match[2]]
