"""How long it takes until an injected fault is named.

    python benchmarks/verdicts.py --trials 3

Three nodes train as in `undisturbed.py`. Each fault is injected into rank 1 of a job of its own: it
computes longer in each step; it is suspended (SIGSTOP); it never returns from a function.
**seconds** are from the fault to the event that names the rank, median and range.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from undisturbed import STARTS_S, Job, fail, make_parser, running

from zero_agent.etcd.local_etcd import private_server

RANK = 1
LIMIT_S = 120.0
WARM_WINDOWS = 1
"""The number of windows of 50 steps before a fault."""


def slower(seconds: str) -> Callable[[Job], None]:
    def inject(job: Job) -> None:
        new = job.directory / "slow.new"
        new.write_text(seconds)
        new.rename(job.directory / f"slow-{RANK}")

    return inject


def signalled(number: signal.Signals) -> Callable[[Job], None]:
    def inject(job: Job) -> None:
        workers = [e for e in job.events() if e["event"] == "worker" and e["rank"] == RANK]
        os.kill(workers[-1]["pid"], number)

    return inject


FAULTS: dict[str, tuple[str, Callable[[Job], None]]] = {
    "computes 1.6 x as long": ("straggler", slower("0.15")),
    "is suspended": ("stuck", signalled(signal.SIGSTOP)),
    "never returns": ("stuck", slower("100000")),
}
"""What rank 1 does -> the event that names it, and the fault."""


def told(job: Job, event: str) -> dict[str, Any]:
    """The first event of a name. Raises SystemExit: none came."""
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s:
        if found := [one for one in job.events() if one["event"] == event]:
            return found[0]
        job.check()
        time.sleep(0.1)
    fail(f"no event {event} within {LIMIT_S:g} s; the logs are in {job.directory}")
    raise AssertionError


def trial(directory: Path, etcd: str, nodes: int, fault: str) -> float:
    """Seconds until a fault is named."""
    event, inject = FAULTS[fault]
    with running(directory, etcd, nodes, []) as job:
        job.wait_for_steps(WARM_WINDOWS, STARTS_S)
        began_s = time.time()
        inject(job)
        verdict = told(job, event)
        took_s = verdict["time"] - began_s
        print(f"{fault}: {took_s:.1f} s: {verdict['text']}", flush=True)
        named = verdict.get("ranks") or [verdict["rank"]]
        if named != [RANK]:
            fail(f"rank {named} is named, and not rank {RANK}")
        return took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=3)
    args = parser.parse_args()
    nodes = make_parser().get_default("nodes")
    found: dict[str, list[float]] = {name: [] for name in FAULTS}
    with private_server() as etcd:
        for _ in range(args.trials):
            for fault, times_s in found.items():
                with tempfile.TemporaryDirectory(prefix="verdicts-") as name:
                    times_s.append(trial(Path(name), etcd, nodes, fault))
    table = Table("rank 1", "verdict", "seconds")
    for name, (event, _) in FAULTS.items():
        times_s = found[name]
        span = f"{statistics.median(times_s):.0f} ({min(times_s):.0f}-{max(times_s):.0f})"
        table.add_row(name, event, span)
    Console().print(table)


if __name__ == "__main__":
    main()
