"""Starting a job: what a renderer made is handed to the tool of that kind of cluster.

On this machine its agents are processes that find each other by themselves. Starting those is the
agent's: one agent takes this process's place, and so does what runs several.

Must always hold: nothing is started while a fatal problem is known; `--dry-run` starts nothing
and says what would be. Who calls it: `command`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from zero_orchestrator.jobfile.reading.reader import Problem
from zero_orchestrator.jobfile.reading.schema import Job
from zero_orchestrator.jobfile.reading.settings import etcd_settings, places, settings
from zero_orchestrator.jobfile.render import kubernetes, slurm
from zero_orchestrator.jobfile.render.kubernetes import ToolMissing
from zero_orchestrator.jobfile.start import facts, preflight

SUBMIT_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Start:
    """How a job is to be started."""

    agents: int
    """On this machine."""
    dry_run: bool


@dataclass(frozen=True, kw_only=True)
class Place:
    """One kind of cluster, as `--on` names it."""

    problems: Callable[[Job], list[Problem]]
    """What would keep a job from running there."""
    start: Callable[[Job, Start], int]
    """Starts it; the exit code."""


def choose() -> tuple[str, str]:
    """Where a job goes when nobody says so, and why there."""
    if (context := facts.Kubectl(None).context()) is not None:
        return "kubernetes", f"kubectl has the context {context}"
    if shutil.which("sbatch") is not None:
        return "slurm", "sbatch is on the PATH"
    return "local", "there is neither a context of kubectl nor sbatch"


# ---- this machine ----


def _command(job: Job, *program: str) -> list[str]:
    """What every agent is started with, or another program that passes it on to them.

    It has no --rdzv-id: the same job file run again after its end is a new run.
    """
    default = Path("runs", job.file.name, "checkpoints")
    program = program or ("zero_agent",)
    return [sys.executable, "-m", *program, job.file.script, *places(job, default)]


def _variables(job: Job) -> dict[str, str]:
    """What every agent is told beside its command line."""
    return settings(job.file) | etcd_settings(job.file)


def _problems_here(job: Job) -> Iterator[Problem]:
    """What would keep a job from starting in this directory, with this environment."""
    if not Path(job.file.script).is_file():
        text = f"{job.file.script}: there is no such file here; run this where it is"
        yield Problem(key="script", text=text)
    for name in job.file.secrets:
        if name not in os.environ:
            text = "is not set; on this machine the agents have it from the environment of zero-ctl"
            yield Problem(key=f"secrets.{name}", text=text)


def _become(job: Job, agents: int) -> NoReturn:
    """Become so many agents."""
    words = (
        _command(job)
        if agents == 1
        else _command(job, "zero_agent.launch.local_agents", str(agents))
    )
    sys.stdout.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until that program can answer it
    os.execve(sys.executable, words, os.environ | _variables(job))


def _reach_etcd(job: Job, *, is_fatal: bool) -> list[Problem]:
    reason = facts.why_no_etcd(job.file.etcd.endpoints) if job.file.etcd.endpoints else None
    if reason is None:
        return []
    text = f"cannot be reached from here: {reason}"
    return [Problem(key="etcd.endpoints", text=text, is_fatal=is_fatal)]


def _start_here(job: Job, how: Start) -> int:
    if how.dry_run:
        words = [f"{name}={shlex.quote(value)}" for name, value in _variables(job).items()]
        print(f"# {how.agents} times:", *words, shlex.join(_command(job)), sep="\n")
        return 0
    return _become(job, how.agents)


# ---- Kubernetes ----


def _kubernetes_problems(job: Job) -> list[Problem]:
    """A cluster's nodes may reach what this machine does not, so that much is a remark."""
    kubectl = facts.Kubectl(job.file.kubernetes.namespace)
    _need("kubectl", "https://kubernetes.io/docs/tasks/tools")
    if (reason := kubectl.why_unreachable()) is not None:
        raise ToolMissing(
            f"the cluster of kubectl's context does not answer: {reason}; choose another with "
            "kubectl config use-context, or --on local"
        )
    found = preflight.check(job.file, facts.ask(kubectl, job.file))
    return [*found, *_reach_etcd(job, is_fatal=False), *_reach_registry(job)]


def _reach_registry(job: Job) -> list[Problem]:
    registry = facts.registry_of(job.file.image)
    reason = facts.why_no_registry(registry) if registry is not None else None
    if reason is None:
        return []
    text = f"{job.file.image}: {registry} cannot be reached from here: {reason}"
    return [Problem(key="image", text=text, is_fatal=False)]


def _apply(job: Job, how: Start) -> int:
    text = kubernetes.render(job)
    namespace = job.file.kubernetes.namespace
    flags = [f"--namespace={namespace}"] if namespace else []
    return _hand_over(["kubectl", "apply", *flags, "--filename=-"], text, how)


# ---- Slurm ----


def _slurm_problems(job: Job) -> list[Problem]:
    _need("sbatch", "run this on a login node of the cluster")
    return _reach_etcd(job, is_fatal=False)


def _submit(job: Job, how: Start) -> int:
    return _hand_over(["sbatch"], slurm.render(job), how)


def _hand_over(words: list[str], text: str, how: Start) -> int:
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


def _need(program: str, remedy: str) -> None:
    if shutil.which(program) is None:
        raise ToolMissing(f"{program} is not on the PATH; {remedy}, or choose another --on")


PLACES: Mapping[str, Place] = {
    "local": Place(
        problems=lambda job: [*_problems_here(job), *_reach_etcd(job, is_fatal=True)],
        start=_start_here,
    ),
    "kubernetes": Place(problems=_kubernetes_problems, start=_apply),
    "slurm": Place(problems=_slurm_problems, start=_submit),
}


def run(job: Job, on: str, how: Start) -> int:
    """Start a job, if nothing is known to keep it from running.

    Raises:
        JobFileError: Something is.
        ToolMissing: The tool of that kind of cluster is not here, or not of use.
    """
    place = PLACES[on]
    found = place.problems(job)
    job.source.refuse(one for one in found if one.is_fatal)
    for problem in found:
        print(f"zero-ctl: {job.source.tell(problem)}", file=sys.stderr)
    return place.start(job, how)
