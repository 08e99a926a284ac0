"""What each kind of cluster makes of a job: a table of renderers.

Must always hold: rendering starts nothing and asks no network. Who calls it: `command`, `run`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from zero_orchestrator.errors import SpecError
from zero_orchestrator.jobfile import compose, kubernetes, slurm, systemd
from zero_orchestrator.jobfile.schema import Job

Renderer = Callable[[Job], dict[str, str]]
"""File name -> text."""

RENDERERS: Mapping[str, Renderer] = {
    "kubernetes": lambda job: {f"{job.file.name}.yaml": kubernetes.render(job)},
    "slurm": lambda job: {f"{job.file.name}.sbatch": slurm.render(job)},
    "compose": lambda job: {f"{job.file.name}.compose.yaml": compose.render(job)},
    "systemd": systemd.files,
}


def shown(files: Mapping[str, str]) -> str:
    """The files as one text; if they are several, each below its name."""
    if len(files) == 1:
        return "".join(files.values())
    return "\n".join(f"# ---- {name}\n{text}" for name, text in files.items())


def write(files: Mapping[str, str], directory: Path) -> list[Path]:
    """Write the files below a directory.

    Raises:
        SpecError: They cannot be written there.
    """
    written = []
    for name, text in files.items():
        path = directory / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if name.startswith(systemd.PRIVATE):
                path.touch(mode=0o600)
                path.chmod(0o600)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise SpecError(f"--output={directory}: {path}: {error.strerror}") from error
        written.append(path)
    return written
