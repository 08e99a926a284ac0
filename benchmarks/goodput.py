"""How much of its training speed a job keeps while its workers are killed again and again.

    python benchmarks/goodput.py --trials 3

Three nodes with one worker each train a GPT under real agents, every step kept in memory, once
left alone and once with one worker after the other killed with -9. **steps** are those finished
within the window, each counted once however often it was done; **kept** is their share of what
the job that was left alone finished in the same trial. The floor of the loss is what a recovery
and the step that it repeats take (`in_memory.py`), per interval.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from in_memory import NODES, add_training, done, read, running, wait
from recovery import below
from rich.console import Console
from rich.table import Table

from zero_agent.etcd.local_etcd import private_server

WARM_STEPS = 10


def finished(directory: Path, args: argparse.Namespace, agents: list[int], *, kills: bool) -> int:
    """Steps finished within the window; on request a worker is killed in each interval."""
    first = max(
        note.step for note in wait(directory, lambda notes: done(notes, NODES) > WARM_STEPS)
    )
    begin = time.monotonic()
    victims = itertools.cycle(agents) if kills else iter(())
    for number, agent in zip(range(args.faults), victims, strict=False):
        time.sleep(max(0.0, begin + (number + 0.5) * args.every_s - time.monotonic()))
        os.kill(worker_of(directory, agent), signal.SIGKILL)
    end = begin + args.faults * args.every_s
    time.sleep(max(0.0, end - time.monotonic()))
    return max(note.step for note in read(directory)) - first


def worker_of(directory: Path, agent: int) -> int:
    """The pid of an agent's newest worker: it writes its notes to a file named after both."""
    pids = set(below(agent))
    files = sorted((directory / "steps").iterdir(), reverse=True)
    return next(pid for file in files if (pid := int(file.name.split("-")[1])) in pids)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=4, help="in each window")
    parser.add_argument("--every-s", type=float, default=30.0, help="between two faults")
    add_training(parser, save_every=100, width=256, layers=4)
    args = parser.parse_args()
    alone: list[int] = []
    disturbed: list[int] = []
    with private_server() as etcd:
        for number in range(args.trials):
            for kills, found in ((False, alone), (True, disturbed)):
                with running("in memory", args, etcd) as (directory, agents):
                    found.append(finished(directory, args, agents, kills=kills))
            kept = disturbed[-1] / alone[-1]
            print(
                f"trial {number + 1}: {disturbed[-1]} of {alone[-1]} steps: {kept:.1%}", flush=True
            )
    show(args, alone, disturbed)


def show(args: argparse.Namespace, alone: list[int], disturbed: list[int]) -> None:
    window_s = args.faults * args.every_s
    table = Table(title=f"steps in {window_s:g} s: median (range)")
    for head in ("left alone", f"a worker killed every {args.every_s:g} s", "kept"):
        table.add_column(head)
    kept = [with_faults / without for with_faults, without in zip(disturbed, alone, strict=True)]
    table.add_row(span(alone, "d"), span(disturbed, "d"), span(kept, ".1%"))
    Console().print(table)


def span(values: Sequence[float], form: str) -> str:
    middle = statistics.median_low(values)
    return f"{middle:{form}} ({min(values):{form}}-{max(values):{form}})"


if __name__ == "__main__":
    main()
