"""Starting a job: the tool of a kind of cluster gets what the renderer of that kind made.

On this machine no scheduler is needed: this process becomes the one agent of the job, or the
program that starts several agents.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from zero_orchestrator.jobfile.reading.reader import Problem
from zero_orchestrator.jobfile.reading.schema import Job
from zero_orchestrator.jobfile.reading.settings import etcd_settings, places, settings
from zero_orchestrator.jobfile.render import kubernetes, slurm
from zero_orchestrator.jobfile.render.kubernetes import ToolMissing
from zero_orchestrator.jobfile.start import facts, preflight

SUBMIT_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """The options of a start."""

    agents: int
    """Number of agents on this machine."""
    dry_run: bool


@dataclass(frozen=True, kw_only=True)
class Place:
    """One kind of cluster, as `--on` names it."""

    program: str | None = None
    """Program that starts a job there."""
    without: str = ""
    """Remedy if the program is not on the PATH."""
    problems: Callable[[Job], list[Problem]]
    """Finds the problems that keep a job from running there."""
    start: Callable[[Job, StartOptions], int]
    """Starts the job; returns the exit code."""


def choose() -> tuple[str, str]:
    """The default of `--on` for this machine, and the reason for it."""
    if (context := facts.Kubectl(None).context()) is not None:
        return "kubernetes", f"kubectl has the context {context}"
    if shutil.which("sbatch") is not None:
        return "slurm", "sbatch is on the PATH"
    return "local", "there is neither a context of kubectl nor sbatch"


def _unreachable_etcd(job: Job, *, is_fatal: bool) -> list[Problem]:
    reason = facts.why_no_etcd(job.file.etcd.endpoints) if job.file.etcd.endpoints else None
    if reason is None:
        return []
    text = f"cannot be reached from here: {reason}"
    return [Problem(key="etcd.endpoints", text=text, is_fatal=is_fatal)]


# ---- this machine ----


def _local_problems(job: Job) -> list[Problem]:
    """The problems that keep a job from starting in this directory, with this environment."""
    found = []
    if not Path(job.file.script).is_file():
        text = f"{job.file.script}: there is no such file here; run this where it is"
        found.append(Problem(key="script", text=text))
    for name in job.file.secrets:
        if name not in os.environ:
            text = "is not set; on this machine the agents have it from the environment of zero-ctl"
            found.append(Problem(key=f"secrets.{name}", text=text))
    return [*found, *_unreachable_etcd(job, is_fatal=True)]


def _start_agents(job: Job, how: StartOptions) -> int:
    """Replace this process by one agent, or by the program that starts several."""
    variables = settings(job.file) | etcd_settings(job.file)
    # No --rdzv-id: the same job file, started again after the end of its run, is a new run.
    default = Path("runs", job.file.name, "checkpoints")
    script = [job.file.script, *places(job, config=str(job.config_path), default=default)]
    python = [sys.executable, "-m"]
    if how.dry_run:
        words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        command = shlex.join([*python, "zero_agent", *script])
        print(f"# {how.agents} times:", *words, command, sep="\n")
        return 0
    several = ["zero_agent.launch.local_agents", str(how.agents)]
    program = ["zero_agent"] if how.agents == 1 else several
    # What is not yet written would be lost with this program.
    sys.stdout.flush()
    # Until that program can answer it: a Ctrl-C meanwhile would end it with a traceback.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    words = [*python, *program, *script]
    return os.execve(sys.executable, words, os.environ | variables)


# ---- clusters ----


def _kubernetes_problems(job: Job) -> list[Problem]:
    """The problems that keep a job from running on the cluster of kubectl's context."""
    kubectl = facts.Kubectl(job.file.kubernetes.namespace)
    if (reason := kubectl.why_unreachable()) is not None:
        raise ToolMissing(
            f"the cluster of kubectl's context does not answer: {reason}; choose another with "
            "kubectl config use-context, or --on local"
        )
    found = preflight.check(job.file, facts.ask(kubectl, job.file))
    # What cannot be reached from here is not fatal: the nodes of the cluster may reach it.
    found += _unreachable_etcd(job, is_fatal=False)
    registry = facts.registry_of(job.file.image)
    if registry is not None and (reason := facts.why_no_registry(registry)) is not None:
        text = f"{job.file.image}: {registry} cannot be reached from here: {reason}"
        found.append(Problem(key="image", text=text, is_fatal=False))
    return found


def _submit(words: list[str], text: str, how: StartOptions) -> int:
    """Run a command with a text as its standard input; return its exit code."""
    if how.dry_run:
        print(f"# {shlex.join(words)}, of this:\n{text}", end="")
        return 0
    try:
        done = subprocess.run(words, input=text, text=True, timeout=SUBMIT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ToolMissing(
            f"{shlex.join(words)} did not end within {SUBMIT_TIMEOUT_S:g} s; see what it has done"
        ) from None
    return done.returncode


PLACES: Mapping[str, Place] = {
    "local": Place(problems=_local_problems, start=_start_agents),
    "kubernetes": Place(
        program="kubectl",
        without="https://kubernetes.io/docs/tasks/tools",
        problems=_kubernetes_problems,
        start=lambda job, how: _submit(
            [
                "kubectl",
                "apply",
                *facts.namespace_flags(job.file.kubernetes.namespace),
                "--filename=-",
            ],
            kubernetes.render(job),
            how,
        ),
    ),
    "slurm": Place(
        program="sbatch",
        without="run this on a login node of the cluster",
        problems=lambda job: _unreachable_etcd(job, is_fatal=False),
        start=lambda job, how: _submit(["sbatch"], slurm.render(job), how),
    ),
}


def run(job: Job, on: str, how: StartOptions) -> int:
    """Start a job on a kind of cluster, unless a problem is known that would keep it from running.

    Returns the exit code of the program that starts the job.

    Raises:
        JobFileError: The job cannot run there.
        ToolMissing: The program that starts a job there is not on the PATH, or cannot be used.
    """
    place = PLACES[on]
    if place.program is not None and shutil.which(place.program) is None:
        remedy = f"{place.without}, or choose another --on"
        raise ToolMissing(f"{place.program} is not on the PATH; {remedy}")
    found = place.problems(job)
    job.source.refuse(one for one in found if one.is_fatal)
    for problem in found:
        print(f"zero-ctl: {job.source.message(problem)}", file=sys.stderr)
    return place.start(job, how)
