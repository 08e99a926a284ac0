"""The job that the deployments run in these tests, and jobs that are only rendered."""

from __future__ import annotations

from pathlib import Path

from zero_orchestrator.jobfile.reading import checks, schema
from zero_orchestrator.jobfile.reading.schema import Job


def job(directory: Path, more: str = "", *, nodes: str = "2:8") -> Job:
    """The job of a file `job.yaml` that says so much, with nothing wrong in it."""
    path = directory / "job.yaml"
    start = "name: gpt\nscript: train.py\nargs: [--checkpoints=$(CHECKPOINTS)]\n"
    path.write_text(f"{start}nodes: {nodes}\n{more}\n")
    found = schema.load(path)
    assert checks.check(found) == []
    return found
