"""A job file as a batch script: deploy/slurm/zero_agent.sbatch with the job's numbers in it.

Must always hold: the script needs nothing but what Slurm gives it, so it may be kept, read and
submitted again by hand. Who calls it: `render`.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator

from zero_orchestrator.jobfile.reading.schema import Job
from zero_orchestrator.jobfile.reading.settings import etcd_settings, places, settings
from zero_orchestrator.jobfile.reading.values import cores_number
from zero_orchestrator.jobfile.render import files

TEMPLATE = "slurm/zero_agent.sbatch"
_BEGIN = "set -euo pipefail\n"
"""Before it, the template says how it is used and asks for nodes; after it, it works."""
_MISSING = "is a secret of this job: set it before sbatch, and let --export pass it on"


def render(job: Job) -> str:
    """The script.

    Raises:
        JobFileError: No directory for checkpoints is named.
    """
    _, _, body = files.read(TEMPLATE).partition(_BEGIN)
    variables = settings(job.file) | etcd_settings(job.file)
    return "".join(
        [
            f"#!/usr/bin/env bash\n# The job {job.file.name}, of {job.source.file}.\n",
            *(f"#SBATCH --{line}\n" for line in _options(job)),
            _BEGIN,
            *(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()),
            *(f': "${{{name}:?{_MISSING}}}"\n' for name in job.file.secrets),
            f"set -- {shlex.join([job.file.script, *places(job)])}\n",
            body,
        ]
    )


def _options(job: Job) -> Iterator[str]:
    """What sbatch is asked for; what the file says in slurm.options comes last, and wins."""
    file = job.file
    yield f"job-name={file.name}"
    yield f"nodes={file.start}"
    yield "ntasks-per-node=1"
    yield f"cpus-per-task={math.ceil(cores_number(file.resources.cpu))}"
    if (limit_bytes := job.memory_limit_bytes) is not None:
        yield f"mem={limit_bytes // 2**20}M"
    if file.resources.gpu:
        yield f"gpus-per-node={file.resources.gpu}"
    yield f"time={file.slurm.time}"
    yield from (
        f"{name}={value}"
        for name, value in (("partition", file.slurm.partition), ("account", file.slurm.account))
        if value is not None
    )
    yield "output=%x-%j.log"
    yield "open-mode=append"
    yield "requeue"
    yield "no-kill"
    yield f"signal=B:USR1@{file.grace:.0f}"
    yield from (f"{name}={value}" if value else name for name, value in file.slurm.options.items())
