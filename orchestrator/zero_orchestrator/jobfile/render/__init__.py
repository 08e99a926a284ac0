"""Rendering a job file for each kind of cluster, which starts nothing and uses no network."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from zero_orchestrator.jobfile.reading.schema import Job
from zero_orchestrator.jobfile.render import kubernetes, slurm, systemd

Renderer = Callable[[Job], dict[str, str]]
"""File name -> text."""

RENDERERS: Mapping[str, Renderer] = {
    "kubernetes": lambda job: {f"{job.file.name}.yaml": kubernetes.render(job)},
    "slurm": lambda job: {f"{job.file.name}.sbatch": slurm.render(job)},
    "systemd": systemd.files,
}
