"""A job file as a batch script: deploy/slurm/zero_agent.sbatch with the values of the job.

The script needs nothing but Slurm: a user can keep it, read it and submit it again by hand.
"""

from __future__ import annotations

import math
import shlex
from pathlib import Path

from zero_orchestrator.jobfile.reading.reader import JobFileError, Problem
from zero_orchestrator.jobfile.reading.schema import CONFIG_NAME, Job, cores_number
from zero_orchestrator.jobfile.reading.settings import etcd_settings, places, settings
from zero_orchestrator.jobfile.render import files

TEMPLATE = "slurm/zero_agent.sbatch"
_BEGIN = "set -euo pipefail\n"
"""Above this line, the template has its usage and its options of sbatch; below it, commands."""
_MISSING = "is a secret of this job: set it before sbatch, and let --export pass it on"


def render(job: Job) -> str:
    """The batch script for sbatch.

    Raises:
        JobFileError: The arguments use the checkpoints' place, which the file does not name.
    """
    file = job.file
    options = [
        f"job-name={file.name}",
        f"nodes={file.start}",
        "ntasks-per-node=1",
        f"cpus-per-task={math.ceil(cores_number(file.resources.cpu))}",
    ]
    if (limit_bytes := job.memory_limit_bytes) is not None:
        options.append(f"mem={limit_bytes // 2**20}M")
    if file.resources.gpu:
        options.append(f"gpus-per-node={file.resources.gpu}")
    where = {name: getattr(file.slurm, name) for name in ("time", "partition", "account")}
    options += [_option(job, name, name, value) for name, value in where.items() if value]
    # As the template, which explains them: its own are above `_BEGIN`, and not in this script.
    options += ["output=%x-%j.log", "open-mode=append", "requeue", "no-kill"]
    options.append(f"signal=B:USR1@{file.grace:.0f}")
    # The user's options are last: of two equal options, sbatch takes the last.
    more = file.slurm.options.items()
    options += [_option(job, f"options.{name}", name, value) for name, value in more]
    config = f"{file.name}.{CONFIG_NAME}"
    variables = settings(file) | etcd_settings(file)
    end = "CONFIG"
    while job.config and end in job.config.split("\n"):  # a line that would end it too early
        end += "_"
    _, _, body = files.read(TEMPLATE).partition(_BEGIN)
    return "".join(
        [
            f"#!/usr/bin/env bash\n# The job {file.name}, of {Path(job.source.file).name}.\n",
            *(f"#SBATCH --{option}\n" for option in options),
            _BEGIN,
            *(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()),
            *(f': "${{{name}:?{_MISSING}}}"\n' for name in file.secrets),
            f"cat >{config} <<'{end}'\n{job.config.rstrip()}\n{end}\n" if job.config else "",
            f"set -- {shlex.join([file.script, *places(job, config=config)])}\n",
            body,
        ]
    )


def _option(job: Job, key: str, name: str, value: str) -> str:
    """An option of sbatch, as a word of its line. Raises JobFileError: no line can hold it."""
    if len(f"{name}={value}.".splitlines()) > 1 or not name.replace("-", "").isalnum():
        text = f"{name}={value}"
        text = f"{text!r} is no option of sbatch: write it on one line, NAME: VALUE"
        raise JobFileError(job.source.message(Problem(key=f"slurm.{key}", text=text)))
    # sbatch takes a backslash within any quotes, where a shell does not.
    return f"{name}={shlex.quote(value).replace(chr(92), chr(92) * 2)}" if value else name
