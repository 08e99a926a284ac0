"""What checkpoints in memory cost in each step, and what a lost node costs with them.

    python benchmarks/in_memory.py --trials 3

Three nodes with one worker each train a GPT under real agents: with every step in memory and one
replica, and beside that with checkpoints on disk alone. After some steps a whole node (agent and
worker) is killed with -9; the job goes on with two. Printed are medians and ranges of

    step        seconds per step, without those of the recovery
    stall       seconds of it that the copy into the staging buffer took, and the same as a
                multiple of one memcpy of the same bytes, measured after the same steps
    recovery    seconds from the kill to the next finished step
    repeated    steps that had been done and had to be done again
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from recovery import kill
from rich.console import Console
from rich.table import Table

from zero_agent.etcd.local_etcd import private_server

HERE = Path(__file__).resolve().parent
LIMIT_S = 300.0
NODES = 3
VICTIM = 1
STEPS = 10_000
SYSTEMS = {"in memory": {"ram": {"every_steps": 1, "replicas": 1}}, "on disk": {}}


@dataclass(frozen=True)
class Note:
    """One step of one rank, as `in_memory_worker.py` writes it."""

    time: float
    step: int
    world: int
    step_s: float
    stall_s: float
    memcpy_s: float
    rank: int


def read(directory: Path) -> list[Note]:
    """All notes, oldest first."""
    kinds = (float, int, int, float, float, float, int)
    lines = [line for f in (directory / "steps").iterdir() for line in f.read_text().splitlines()]
    split = [line.split() for line in lines if line.count(" ") == len(kinds) - 1]
    notes = [Note(*(kind(w) for kind, w in zip(kinds, words, strict=True))) for words in split]
    return sorted(notes, key=lambda note: note.time)


@contextlib.contextmanager
def running(system: str, args: argparse.Namespace, etcd: str) -> Iterator[tuple[Path, list[int]]]:
    """A job of three nodes: its directory, and the agents' pids."""
    with tempfile.TemporaryDirectory(prefix="ram-", dir=args.root) as name:
        directory = Path(name)
        (directory / "steps").mkdir()
        config = {
            "train_batch_size": 2 * NODES * 2,
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "checkpoint": {**SYSTEMS[system], "weight_hash": False},
        }
        (directory / "config.json").write_text(json.dumps(config))
        sizes = [str(n) for n in (STEPS, args.width, args.layers, args.save_every)]
        script = [str(HERE / "in_memory_worker.py"), name, str(directory / "config.json"), *sizes]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        flags = ["--nnodes=2:3", "--max-restarts=1000", f"--rdzv-endpoint={etcd}"]
        flags.append(f"--rdzv-id={directory.name}")
        with (directory / "log").open("wb") as log:
            agents = [
                subprocess.Popen(
                    [sys.executable, "-m", "zero_agent", *flags, f"--node-id=n{node}", *script],
                    stdout=log,
                    stderr=log,
                    env=env,
                    start_new_session=True,
                )
                for node in range(NODES)
            ]
        try:
            yield directory, [agent.pid for agent in agents]
        finally:
            for agent in agents:
                kill(agent.pid)
                agent.wait()


@dataclass(frozen=True)
class Trial:
    step_s: float
    stall_s: float
    stall_ratio: float
    recovery_s: float
    repeated: int


def trial(system: str, args: argparse.Namespace, etcd: str) -> Trial:
    with running(system, args, etcd) as (directory, agents):
        before = wait(directory, lambda notes: done(notes, NODES) >= args.steps)
        killed = time.time()
        kill(agents[VICTIM])
        after = wait(directory, lambda notes: done(notes, NODES - 1) > 0)
        steady = [note for note in before if note.step > 3]
        last = max(note.step for note in after if note.world == NODES)
        first = min((note for note in after if note.world < NODES), key=lambda note: note.time)
        return Trial(
            step_s=statistics.median(note.step_s for note in steady),
            stall_s=statistics.median(note.stall_s for note in steady),
            stall_ratio=statistics.median(note.stall_s / note.memcpy_s for note in steady),
            recovery_s=first.time - killed,
            repeated=last - first.step + 1,
        )


def done(notes: Sequence[Note], world: int) -> int:
    """How many steps were done at a world size."""
    return len({note.step for note in notes if note.world == world})


def wait(directory: Path, condition: object) -> list[Note]:
    deadline = time.monotonic() + LIMIT_S
    while not condition(notes := read(directory)):  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise SystemExit(
                f"not within {LIMIT_S:g} s:\n{(directory / 'log').read_text()[-3000:]}"
            )
        time.sleep(0.02)
    return notes


def add_training(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """The flags of `running`, and how often."""
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--save-every", type=int, help="steps between saves to disk")
    parser.add_argument("--width", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--root", type=Path, help="where checkpoints go (the temporary directory)")
    parser.set_defaults(**defaults)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=15, help="before the kill")
    add_training(parser, save_every=10, width=512, layers=8)
    args = parser.parse_args()
    found: dict[str, list[Trial]] = {system: [] for system in SYSTEMS}
    with private_server() as etcd:
        for number in range(args.trials):
            for system in SYSTEMS:
                found[system].append(trial(system, args, etcd))
                print(f"trial {number + 1}: {system}: {found[system][-1]}", flush=True)
    show(found)


def show(found: dict[str, list[Trial]]) -> None:
    table = Table(title="seconds: median (range)")
    for head in ("checkpoints", "step", "stall", "stall / memcpy", "recovery", "repeated"):
        table.add_column(head)
    for system, trials in found.items():
        columns = zip(*(vars(one).values() for one in trials), strict=True)
        table.add_row(system, *(summary(column) for column in columns))
    Console().print(table)


def summary(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g}-{max(values):.3g})"


if __name__ == "__main__":
    main()
