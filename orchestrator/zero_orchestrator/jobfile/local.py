"""A job on this machine: its agents as processes, which find each other by themselves.

Starting processes is the agent's: one agent takes this process's place, and so does what runs
several. Who calls it: `run`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from zero_orchestrator.jobfile.machines import places
from zero_orchestrator.jobfile.reading import Problem
from zero_orchestrator.jobfile.schema import Job
from zero_orchestrator.jobfile.settings import etcd_settings, settings


def command(job: Job, *program: str) -> list[str]:
    """What every agent is started with, or another program that passes it on to them.

    It has no --rdzv-id: the same job file run again after its end is a new run.
    """
    default = Path("runs", job.file.name, "checkpoints")
    program = program or ("zero_agent",)
    return [sys.executable, "-m", *program, job.file.script, *places(job, default)]


def variables(job: Job) -> dict[str, str]:
    """What every agent is told beside its command line."""
    return settings(job.file) | etcd_settings(job.file)


def problems(job: Job) -> Iterator[Problem]:
    """What would keep a job from starting in this directory, with this environment."""
    if not Path(job.file.script).is_file():
        text = f"{job.file.script}: there is no such file here; run this where it is"
        yield Problem(key="script", text=text)
    for name in job.file.secrets:
        if name not in os.environ:
            text = "is not set; on this machine the agents have it from the environment of zero-ctl"
            yield Problem(key=f"secrets.{name}", text=text)


def start(job: Job, agents: int) -> NoReturn:
    """Become so many agents."""
    words = command(job) if agents == 1 else command(job, "zero_agent.several", str(agents))
    sys.stdout.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until that program can answer it
    os.execve(sys.executable, words, os.environ | variables(job))
