"""A job file as files of systemd: the unit of deploy/systemd, the job's variables, its limits.

Every machine of the job gets the same files.
"""

from __future__ import annotations

from pathlib import Path

from zero_orchestrator.jobfile.reading.reader import JobFileError, Problem
from zero_orchestrator.jobfile.reading.schema import CONFIG_NAME, Job
from zero_orchestrator.jobfile.reading.settings import etcd_settings, places, settings
from zero_orchestrator.jobfile.render.files import PRIVATE, read

UNIT = "zero-agent@.service"


def files(job: Job) -> dict[str, str]:
    """Path below the root of a machine -> text.

    Raises:
        JobFileError: A value that machines need is missing, or an environment file cannot hold it.
    """
    file = job.file
    if not file.etcd.endpoints:
        text = "are missing; machines without a scheduler meet at an etcd of yours"
        raise JobFileError(job.source.message(Problem(key="etcd.endpoints", text=text)))
    config = f"srv/{file.name}/{CONFIG_NAME}"
    words = [file.script, *places(job, config=f"/{config}")]
    variables = settings(file) | etcd_settings(file)
    for text in (*words, *variables.values()):
        # systemd splits ZERO_SCRIPT at white space, and takes it away around any value; it reads
        # quotes and backslashes in any value.
        kept = text.split() == [text] if text in words else text.strip() == text
        if not kept or any(letter in text for letter in "\n\r\"'\\"):
            wrong = f"{text!r}: an environment file of systemd cannot hold it; put it into a file"
            raise JobFileError(job.source.message(Problem(key="", text=wrong)))
    variables["ZERO_SCRIPT"] = " ".join(words)
    limits = [
        f"# The job {file.name}, of {Path(job.source.file).name}.",
        "[Service]",
        f"TimeoutStopSec={file.grace:.0f}",
    ]
    if (limit_bytes := job.memory_limit_bytes) is not None:
        limits.append(f"MemoryMax={limit_bytes}")
    if file.secrets:
        limits += [
            f"# For root alone, with a line NAME=VALUE for each of: {', '.join(file.secrets)}",
            f"EnvironmentFile=/{PRIVATE}/{file.name}.secrets.env",
        ]
    return {
        f"etc/systemd/system/{UNIT}": read(f"systemd/{UNIT}"),
        f"etc/systemd/system/zero-agent@{file.name}.service.d/job.conf": "".join(
            f"{line}\n" for line in limits
        ),
        f"{PRIVATE}/{file.name}.env": "".join(
            f"{name}={value}\n" for name, value in variables.items()
        ),
        **({config: job.config} if job.config is not None else {}),
    }
