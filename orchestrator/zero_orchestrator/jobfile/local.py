"""A job on this machine: its agents as processes, which find each other by themselves.

One agent takes this process's place; several are its children, each in a session of its own, and
get every signal that comes here, so Ctrl-C drains them all. Who calls it: `run`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from zero_orchestrator.errors import SpecError
from zero_orchestrator.jobfile.machines import places
from zero_orchestrator.jobfile.schema import Job
from zero_orchestrator.jobfile.settings import etcd_settings, settings

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def command(job: Job) -> list[str]:
    """What every agent is started with.

    It has no --rdzv-id: the same job file run again after its end is a new run.
    """
    default = Path("runs", job.file.name, "checkpoints")
    return [sys.executable, "-m", "zero_agent", job.file.script, *places(job, default)]


def variables(job: Job) -> dict[str, str]:
    """What every agent is told beside its command line."""
    return settings(job.file) | etcd_settings(job.file)


def start(job: Job, agents: int) -> int:
    """Run so many agents to their end; the exit code of the job.

    Raises:
        SpecError: There is no such script here.
    """
    if not Path(job.file.script).exists():
        raise SpecError(
            f"script: {job.file.script}: there is no such file here; run this where it is"
        )
    environment = os.environ | variables(job)
    sys.stdout.flush()
    if agents == 1:
        os.execve(sys.executable, command(job), environment)
    return _run(command(job), environment, agents)


def _run(words: Sequence[str], environment: Mapping[str, str], agents: int) -> int:
    started: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: object) -> None:
        for process in started:
            process.send_signal(number)  # does nothing once it has ended

    before = [signal.signal(number, forward) for number in _FORWARDED]
    try:
        started.extend(
            subprocess.Popen(words, env=environment, start_new_session=True) for _ in range(agents)
        )
        codes = [process.wait() for process in started]
    finally:
        for number, handler in zip(_FORWARDED, before, strict=True):
            signal.signal(number, handler)
    return 0 if 0 in codes else max(128 - code if code < 0 else code for code in codes)
