"""A job file as what systemd reads: the unit of deploy/systemd, the job's variables, its limits.

Must always hold: every machine of the job gets the same files. Who calls it: `render`.
"""

from __future__ import annotations

from zero_orchestrator.jobfile.reading.reader import JobFileError, Problem
from zero_orchestrator.jobfile.reading.schema import Job
from zero_orchestrator.jobfile.reading.settings import etcd_settings, places, settings
from zero_orchestrator.jobfile.render.files import PRIVATE, read

UNIT = "zero-agent@.service"


def files(job: Job) -> dict[str, str]:
    """Path below the root of a machine -> text.

    Raises:
        JobFileError: Something that systemd's agents need is missing, or cannot be written for it.
    """
    file = job.file
    if not file.etcd.endpoints:
        text = "are missing; machines without a scheduler meet at an etcd of yours"
        raise JobFileError(job.source.tell(Problem(key="etcd.endpoints", text=text)))
    words = [file.script, *places(job)]
    variables = settings(file) | etcd_settings(file)
    for text in (*words, *variables.values()):
        among = " \t\n\"'\\" if text in words else "\n\"'\\"
        if any(letter in text for letter in among):
            wrong = f"{text!r}: an environment file of systemd cannot hold it; put it into a file"
            raise JobFileError(job.source.tell(Problem(key="", text=wrong)))
    variables["ZERO_SCRIPT"] = " ".join(words)
    return {
        f"etc/systemd/system/{UNIT}": read(f"systemd/{UNIT}"),
        f"etc/systemd/system/zero-agent@{file.name}.service.d/job.conf": _limits(job),
        f"{PRIVATE}/{file.name}.env": "".join(
            f"{name}={value}\n" for name, value in variables.items()
        ),
    }


def _limits(job: Job) -> str:
    file = job.file
    lines = [
        f"# The job {file.name}, of {job.source.file}.",
        "[Service]",
        f"TimeoutStopSec={file.grace:.0f}",
    ]
    if (limit_bytes := job.memory_limit_bytes) is not None:
        lines.append(f"MemoryMax={limit_bytes}")
    if file.secrets:
        lines += [
            f"# For root alone, with a line NAME=VALUE for each of: {', '.join(file.secrets)}",
            f"EnvironmentFile=/{PRIVATE}/{file.name}.secrets.env",
        ]
    return "".join(f"{line}\n" for line in lines)
