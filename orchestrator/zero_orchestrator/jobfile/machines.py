"""Where the script's files are on machines, as opposed to pods: directories that all of them see.

Who calls it: the renderers for Slurm and systemd, and `local`.
"""

from __future__ import annotations

from pathlib import Path

from zero_orchestrator.jobfile.reading import JobFileError, Problem
from zero_orchestrator.jobfile.schema import Job


def places(job: Job, default: Path | None = None) -> list[str]:
    """The script's arguments, with the config's and the checkpoints' paths.

    Args:
        job: The job.
        default: Where checkpoints go if the file does not say.

    Raises:
        JobFileError: They name the checkpoints' place, and the file does not.
    """
    wanted = job.file.checkpoint
    path = wanted.url or wanted.path or default
    if path is None and job.file.uses("CHECKPOINTS"):
        text = (
            "is missing; on machines $(CHECKPOINTS) is a directory that all of them see, or a url"
        )
        raise JobFileError(job.source.tell(Problem(key="checkpoint.path", text=text)))
    return job.file.arguments(config=str(job.config_path), checkpoints=str(path))
