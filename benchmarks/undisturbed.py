"""Whether a verdict is made about a job that nothing disturbs: each one is a false alarm.

    python benchmarks/undisturbed.py --minutes 60

The agents of some nodes, with one worker each, train a small model on this machine, and save
checkpoints. A pause in each step keeps the job light: other processes on the machine are its noise.
**alarms** are the verdicts of each kind, the workers that were killed for taking no step (hang),
and the rounds that a failure has ended (interrupt). **step** is the time of a step of rank 0, and
**load** the load average of the machine. Exit code 1: there was an alarm; 2: the job did not run.
In both cases the directory with the logs and events is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from observe import endless, make
from recovery import kill

from zero_agent.etcd.local_etcd import private_server
from zero_orchestrator.observe.verdicts import Kind

ALARMS = (*(str(kind) for kind in Kind), "hang", "interrupt")
"""The events that no undisturbed job has."""
STARTS_S = 300.0
"""The time in which the first step is taken."""
STANDS_S = 120.0
"""A job whose rank 0 writes no step for so long does not run any more."""
LOOK_S = 5.0
SAY_S = 300.0
WINDOW_STEPS = 50
"""The number of steps of which the worker of rank 0 notes the median and the longest time."""


# ---- a worker ----


def work(args: argparse.Namespace) -> None:
    """Train until the agents end; a file slow-R in the directory has seconds for rank R's steps."""
    directory, engine, times_s = Path(args.directory), make(args), []
    slow = directory / f"slow-{engine.global_rank}"
    begin_s = time.monotonic()
    for (batch,) in endless(engine.training_dataloader):
        engine.backward(engine(batch).square().mean())
        time.sleep(args.pause_s + (float(slow.read_text()) if slow.exists() else 0.0))
        engine.step()
        times_s.append(time.monotonic() - begin_s)
        if engine.checkpoint_due(every_steps=args.save_every):
            engine.save_checkpoint(directory / "checkpoints")
        begin_s = time.monotonic()
        if len(times_s) == WINDOW_STEPS:
            note(directory / f"steps-{engine.global_rank}", engine.global_steps, times_s)
            times_s.clear()


def note(path: Path, step: int, times_s: list[float]) -> None:
    with path.open("a") as file:
        file.write(f"{step} {statistics.median(times_s):.6f} {max(times_s):.6f}\n")


# ---- the job ----


class Job:
    """The agents of one job, and what they have told."""

    def __init__(self, directory: Path, agents: list[subprocess.Popen[bytes]]) -> None:
        self.directory = directory
        self.agents = agents

    def events(self) -> list[dict[str, Any]]:
        """The events of all agents, oldest first."""
        files = (self.directory / "logs").glob("*/events-*.jsonl")
        whole = [file.read_text().rpartition("\n")[0].splitlines() for file in files]
        return sorted((json.loads(line) for of in whole for line in of), key=lambda e: e["time"])

    def steps(self) -> list[tuple[int, float, float]]:
        """What rank 0 has noted: the last step, the median and the longest time of each window."""
        path = self.directory / "steps-0"
        lines = path.read_text().splitlines() if path.exists() else []
        split = [line.split() for line in lines if line.count(" ") == 2]
        return [(int(step), float(middle), float(longest)) for step, middle, longest in split]

    def check(self) -> None:
        """Raises SystemExit: an agent has ended."""
        if any(agent.poll() is not None for agent in self.agents):
            fail(f"an agent has ended; its output is in {self.directory}/log")

    def wait_for_steps(self, more: int, limit_s: float) -> None:
        """Wait until rank 0 has noted more than so many windows. Raises SystemExit: too late."""
        until_s = time.monotonic() + limit_s
        while len(self.steps()) <= more:
            self.check()
            if time.monotonic() > until_s:
                fail(f"no step for {limit_s:g} s; the agents' output is in {self.directory}/log")
            time.sleep(0.5)


def fail(text: str) -> None:
    """The job did not run. Raises SystemExit."""
    print(text, file=sys.stderr)
    raise SystemExit(2)


@contextlib.contextmanager
def running(directory: Path, etcd: str, nodes: int, arguments: list[str]) -> Iterator[Job]:
    """A job of so many nodes that trains; it is killed at the end."""
    flags = [f"--nnodes={nodes}", f"--rdzv-endpoint={etcd}", f"--rdzv-id={directory.name}"]
    flags += [f"--log-dir={directory}/logs", "--rdzv-conf=last_call_timeout=140"]
    worker = [str(Path(__file__).resolve()), f"--directory={directory}", *arguments]
    with (directory / "log").open("wb") as log:
        agents = [
            subprocess.Popen(
                [sys.executable, "-m", "zero_agent", *flags, f"--node-id=n{node}", *worker],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            for node in range(nodes)
        ]
    try:
        yield Job(directory, agents)
    finally:
        for agent in agents:
            kill(agent.pid)
            agent.wait()


# ---- the measurement ----


def is_alarm(event: dict[str, Any]) -> bool:
    """Whether an event is an alarm, and not the end of one."""
    return event["event"] in ALARMS and False not in (event.get("slow"), event.get("stuck"))


def watch(job: Job, minutes: float) -> tuple[list[dict[str, Any]], list[float]]:
    """The alarms of a job within some minutes from its first steps, and the load meanwhile."""
    job.wait_for_steps(0, STARTS_S)
    begin_s = said_s = stepped_s = time.monotonic()
    alarms: list[dict[str, Any]] = []
    loads: list[float] = []
    windows = 0
    while (passed_s := time.monotonic() - begin_s) < 60 * minutes:
        time.sleep(min(LOOK_S, 60 * minutes - passed_s))
        job.check()
        loads.append(os.getloadavg()[0])
        found = [event for event in job.events() if is_alarm(event)]
        for event in (event for event in found if event not in alarms):
            print(f"{passed_s / 60:.1f} min: {event['event']}: {event['text']}", flush=True)
        alarms = found
        if len(job.steps()) > windows:
            windows, stepped_s = len(job.steps()), time.monotonic()
        if time.monotonic() - stepped_s > STANDS_S:
            fail(f"no step for {STANDS_S:g} s; the agents' output is in {job.directory}/log")
        if time.monotonic() - said_s > SAY_S:
            said_s = time.monotonic()
            step, load = job.steps()[-1][0], loads[-1]
            print(f"{passed_s / 60:.0f} min: step {step:,}, load {load:.1f}", flush=True)
    return alarms, loads


def show(job: Job, alarms: list[dict[str, Any]], loads: list[float], minutes: float) -> None:
    steps = job.steps()
    middle_ms = [1e3 * middle for _, middle, _ in steps]
    counts = Counter(event["event"] for event in alarms)
    print(f"{steps[-1][0]:,} steps of {len(job.agents)} nodes in {minutes:g} minutes")
    print(f"step: median {span(middle_ms, '.0f')} ms, longest {max(s[2] for s in steps):.2f} s")
    print(f"load: {span(loads, '.1f')} on {os.cpu_count()} CPUs")
    print("alarms: " + ", ".join(f"{kind} {counts[kind]}" for kind in ALARMS))


def span(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--pause-s", type=float, default=0.25, help="pause in each step")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32, help="rows of a micro-batch")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    if args.directory:
        work(args)
        return
    directory = Path(tempfile.mkdtemp(prefix="undisturbed-"))
    print(f"logs and events: {directory}", flush=True)
    with (
        private_server() as etcd,
        running(directory, etcd, args.nodes, sys.argv[1:]) as job,
    ):
        alarms, loads = watch(job, args.minutes)
        show(job, alarms, loads, args.minutes)
    if alarms:
        raise SystemExit(1)
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
