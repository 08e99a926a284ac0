"""All faults at random, on real agents, etcd, networks and disks: does every promise hold?

    python benchmarks/chaos.py --minutes 30 --seed 1
    python benchmarks/chaos.py --minutes 30 --seed 1 --schedule      # what would happen when

Four nodes and three members of etcd in network namespaces, with a disk for checkpoints, run two
jobs at a time: one under the engine, one under FSDP2. In each interval one fault happens; the
seed decides which, when, to whom and for how long. After the last one, both jobs train on to their
end. Then their recorded history is judged: every revision of their keys in etcd, the events, the
exit codes, the ledger of the samples, and the weights of every checkpoint on disk, compared with
those of one plain process to which nothing has happened.

Root is needed. Exit code 1: something does not hold, and the directory with all logs is kept, as
after a long stop of a job; 2: it did not run. Ctrl-C ends it early; then only what must hold at any
time is judged.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from chaos_cluster import WORKER, ChaosCluster, needs
from chaos_faults import FAULTS, NotNow
from chaos_judge import Happened, JobRecord, Undisturbed, in_order, judge
from chaos_report import Story, show
from chaos_schedule import JOBS, NODES, Fault, schedule, summary
from chaos_worker import SAMPLES, end_after

from tests.support.cluster import environment, whole_lines
from zero_data.ledger import read_ledger

WARM_STEPS = 5
STARTS_S = 240.0
"""The time in which both jobs take their first steps."""
LIVE_S = 300.0
"""Both jobs end within this time, and that of their steps, after the last fault (I6)."""
LONG_S = 25.0
"""No fault explains a longer time between two steps, not even a hang or the loss of all nodes."""
STEP_S = 0.5
"""The time of a step at full speed, at most."""
LOOK_S = 0.1
SAY_S = 60.0


class Interrupted(Exception):
    """Ctrl-C, or SIGTERM."""


@dataclass
class Run:
    """One run: what is to happen, and what has happened."""

    cluster: ChaosCluster
    happened: list[Happened] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    _waiting: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _number: Iterator[int] = field(default_factory=itertools.count)
    _said_s: float = 0.0
    _begin_s: float = 0.0

    def begin(self) -> None:
        """Start all nodes, and wait for the first steps. Raises SystemExit: there are none."""
        for node in NODES:
            for job in JOBS:
                self.cluster.start(job, node)
        until_s = time.monotonic() + STARTS_S
        while any(step_of(self.cluster.directory / job) < WARM_STEPS for job in JOBS):
            if time.monotonic() > until_s:
                fail(f"no step for {STARTS_S:g} s; the logs are in {self.cluster.directory}")
            time.sleep(LOOK_S)

    def play(self, faults: tuple[Fault, ...], minutes: float) -> None:
        """Let everything happen, and heal it."""
        begin_s = self._said_s = self._begin_s = time.monotonic()
        for fault in faults:
            self._later(begin_s + fault.at_s, lambda fault=fault: self._inject(fault))
        while self._waiting or time.monotonic() < begin_s + 60 * minutes:
            self._turn()

    def finish(self) -> float:
        """Let both jobs train to one end at full speed; how long that took."""
        begin_s = time.monotonic()
        done = {job: step_of(self.cluster.directory / job) for job in JOBS}
        for name, job in self.cluster.jobs.items():
            end_after(self.cluster.directory / name, max(done.values()))
            job.pace(0)
        until_s = begin_s + LIVE_S + STEP_S * (max(done.values()) - min(done.values()))
        while not all(map(self.cluster.over, JOBS)) or self.cluster.runs:
            self._turn()
            if time.monotonic() > until_s:
                print(f"not over {until_s - begin_s:g} s after the last fault", flush=True)
                break
        return time.monotonic() - begin_s

    def _turn(self) -> None:
        now_s = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now_s:
            heapq.heappop(self._waiting)[2]()
        self.cluster.look_after()
        if now_s - self._said_s > SAY_S:
            self._said_s = now_s
            steps = ", ".join(f"{j} step {step_of(self.cluster.directory / j)}" for j in JOBS)
            self.say(f"{steps}, load {os.getloadavg()[0]:.1f}")
        self.loads.append(os.getloadavg()[0])
        time.sleep(LOOK_S)

    def _later(self, at_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._waiting, (at_s, next(self._number), action))

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._begin_s:7.1f}  {text}", flush=True)

    def _inject(self, fault: Fault) -> None:
        row, text = FAULTS[fault.kind], str(fault)[9:]
        if lacks := row.needs(self.cluster):
            self.say(f"not possible here: {text}: {lacks}")
            return
        at_s = time.monotonic()  # before: what it causes may be known before all of it is done
        try:
            undo = row.inject(self.cluster, fault)
        except NotNow as reason:
            self.say(f"not now: {text}: {reason}")
            return
        self.say(text)
        kind, until_s = row.kind, time.monotonic() + fault.for_s
        self.happened.append(
            Happened(fault.kind, kind.free, at_s, until_s, fault.job, kind.unknown_s)
        )
        if undo is not None:
            self._later(until_s, undo)


def step_of(directory: Path) -> int:
    """The highest step that a worker of a job has noted."""
    return max((step for _, step, _ in steps_of(directory)), default=0)


def steps_of(directory: Path) -> list[tuple[float, int, int]]:
    """(time, step, world) of all that was noted, oldest first."""
    lines = [line.split() for file in (directory / "steps").iterdir() for line in whole_lines(file)]
    return sorted((float(at_s), int(step), int(world)) for at_s, step, world in lines)


def starts_in(output: str) -> tuple[int, int]:
    """Starts of a node's worker, and those in the process of the round before."""
    same = re.findall(r": this node runs rank .*?(; 1 of 1 in the same process)?$", output, re.M)
    return len(same), sum(map(bool, same))


def fail(text: str) -> None:
    """It did not run. Raises SystemExit."""
    print(text, file=sys.stderr)
    raise SystemExit(2)


# ---- what was recorded ----


def record_of(run: Run, job: str) -> JobRecord:
    """All that is known of a job; the cluster may be closed."""
    cluster = run.cluster
    recorder, output = cluster.recorders[job], cluster.jobs[job].output
    return JobRecord(
        job=cluster.jobs[job].job,
        batches=in_order(recorder.batches),
        arrived_s=recorder.arrived_s,
        exits=[one for one in cluster.exits if one.job == job],
        outlived=[(node, for_s) for of, node, for_s in cluster.outlived if of == job],
        faults=run.happened,
        entries=read_ledger(cluster.directory / job / "ledger"),
        samples=SAMPLES,
        manifests=cluster.manifests[job],
        final_hashes=frozenset(re.findall(r"^done: .* weight hash (\S+)$", output, re.MULTILINE)),
    )


def undisturbed(directory: Path, args: argparse.Namespace, epochs: Path) -> Undisturbed:
    """Train as many epochs in one plain process. Raises SystemExit: it fails."""
    directory.mkdir()
    shutil.copy(epochs, directory / "epochs")
    command = [sys.executable, str(WORKER), "plain", "0", str(args.seed)]
    done = subprocess.run(
        [*command, str(directory), str(directory / "checkpoints")],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.search(r"^done: (\d+) steps, weight hash (\S+)$", done.stdout, re.MULTILINE)
    if found is None:
        fail(f"the undisturbed training failed: {done.stderr[-2000:]}")
        raise AssertionError
    lines = (line.split() for line in whole_lines(directory / "hashes"))
    return Undisturbed(int(found[1]), found[2], {int(step): digest for step, digest in lines})


# ---- the whole ----


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT and SIGTERM raise Interrupted, once: what is tidied up after it is not interrupted."""

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Interrupted

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def play(args: argparse.Namespace, directory: Path, faults: tuple[Fault, ...]) -> Story:
    """The whole run, to its end or to Ctrl-C; nothing of it is left but the directory."""
    reference, finished_s = None, 0.0
    with interruptible():
        cluster = ChaosCluster(directory, seed=args.seed, stage=args.stage, pause_s=args.pause_s)
        print(f"namespaces: {cluster.net.prefix}*", flush=True)
        run = Run(cluster)
        begin_s = time.monotonic()
        try:
            with contextlib.closing(cluster):
                run.begin()
                begin_s = time.monotonic()
                run.play(faults, args.minutes)
                finished_s = run.finish()
            epochs = directory / JOBS[0] / "epochs"
            reference = undisturbed(directory / "plain", args, epochs)
        except Interrupted:
            print("interrupted", flush=True)
    records = {job: record_of(run, job) for job in JOBS}
    (directory / "records.pickle").write_bytes(pickle.dumps((records, reference)))
    return Story(
        faults=run.happened,
        begin_s=begin_s,
        finished_s=finished_s,
        loads=run.loads,
        steps={job: steps_of(directory / job) for job in JOBS},
        starts={job: starts_in(cluster.jobs[job].output) for job in JOBS},
        goodput={job: tuple(cluster.recorders[job].goodput.values()) for job in JOBS},
        problems={job: judge(record, reference) for job, record in records.items()},
        records=records,
        reference=reference,
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every-s", type=float, default=15.0, help="one fault in so many seconds")
    parser.add_argument("--pause-s", type=float, default=0.25, help="pause in each step")
    parser.add_argument(
        "--stage", type=int, default=3, choices=range(4), help="ZeRO stage of the engine's job"
    )
    parser.add_argument("--only", help="only faults whose name has this in it")
    parser.add_argument("--schedule", action="store_true", help="print the schedule, and end")
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    if not (0 < args.minutes < math.inf and 0 < args.every_s < math.inf and args.pause_s >= 0):
        parser.error("--minutes and --every-s are numbers above 0, --pause-s is one from 0 on")
    kinds = {name: row.kind for name, row in FAULTS.items() if (args.only or "") in name}
    if not kinds:
        parser.error(
            f"--only: no fault has {args.only!r} in its name; there are: {'; '.join(FAULTS)}"
        )
    faults = schedule(kinds, seed=args.seed, minutes=args.minutes, every_s=args.every_s)
    print(f"seed {args.seed}: {len(faults)} faults in {args.minutes:g} minutes: {summary(faults)}")
    if args.schedule:
        print("\n".join(map(str, faults)))
        return
    if lacks := needs():
        fail(lacks)
    directory = Path(tempfile.mkdtemp(prefix="chaos-"))
    print(f"logs and events: {directory}", flush=True)
    story = play(args, directory, faults)
    show(story)
    if any(story.problems.values()):
        raise SystemExit(1)
    gaps = (itertools.pairwise(at_s for at_s, *_ in steps) for steps in story.steps.values())
    longest_s = max((later - earlier for earlier, later in itertools.chain(*gaps)), default=0.0)
    if longest_s > LONG_S:
        print(f"a job stood still for {longest_s:.0f} s, so the logs are kept")
        return
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
