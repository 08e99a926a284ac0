"""Job files for tests: the required keys, and more."""

from __future__ import annotations

from pathlib import Path

from zero_orchestrator.jobfile.reading import schema
from zero_orchestrator.jobfile.reading.schema import Job

LEAST = "name: gpt\nscript: train.py\nnodes: 2:8\n"


def job(directory: Path, more: str = "", *, text: str = LEAST) -> Job:
    """The job of a file `job.yaml` with this text."""
    path = directory / "job.yaml"
    path.write_text(text + more)
    return schema.load(path)
