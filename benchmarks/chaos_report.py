"""What a run of `chaos.py` has found, for people."""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from chaos_judge import Happened, JobRecord, Undisturbed
from rich.console import Console
from rich.table import Table

from zero_orchestrator.observe.events import read_goodput
from zero_orchestrator.observe.goodput import Use, add_up, in_parts
from zero_orchestrator.store.kv import KeyValue

STEP_S = 0.5
AFTER_S = 60.0
"""What begins later is none of a fault's."""
LOST = (Use.REFORMING, Use.REPEATED)
"""What the faults cost the nodes, beside standing still."""


@dataclass(frozen=True, kw_only=True)
class Story:
    """One run."""

    faults: Sequence[Happened]
    begin_s: float
    finished_s: float
    """How long the jobs trained on after the last fault."""
    loads: Sequence[float]
    steps: Mapping[str, Sequence[tuple[float, int, int]]]
    """Job -> (time, step, world) of each step of its rank 0."""
    starts: Mapping[str, tuple[int, int]]
    """Job -> starts of a worker in a round; those in the process of the round before."""
    goodput: Mapping[str, Sequence[KeyValue]]
    """Job -> the ledger of the time of each node."""
    records: Mapping[str, JobRecord]
    problems: Mapping[str, Sequence[str]]
    reference: Undisturbed | None


def standstills(
    faults: Sequence[Happened], steps: Sequence[tuple[float, int, int]]
) -> Iterator[tuple[str, float, float]]:
    """Of each fault, until the next one: the longest time between two steps, and what all cost.

    A time costs what it is longer than a step if it is longer than two, such as when the job forms
    a round without a node, and one with it again. The last step before a fault ends up to `STEP_S`
    before it.
    """
    times = [at_s for at_s, _, _ in steps]
    gaps = list(itertools.pairwise(times))
    begins = [*(fault.at_s for fault in faults), float("inf")]
    for fault, (_, end_s) in zip(faults, itertools.pairwise(begins), strict=True):
        mine = [
            later - earlier
            for earlier, later in gaps
            if fault.at_s <= earlier + STEP_S < end_s and earlier < fault.until_s + AFTER_S
        ]
        lost_s = sum(gap - STEP_S for gap in mine if gap > 2 * STEP_S)
        yield fault.what, max(mine, default=0.0), lost_s


def unknown_s(faults: Sequence[Happened], job: str) -> float:
    """How long a job stands still while nobody can know of its faults, if it has those nodes."""
    return sum(fault.unknown_s for fault in faults if fault.job in ("", job))


def show(story: Story) -> None:
    table = Table(title="longest time between two steps, seconds: median (range)")
    for head in ("fault", "times", *story.steps, "each costs", "of all"):
        table.add_column(head)
    gaps = {job: list(standstills(story.faults, steps)) for job, steps in story.steps.items()}
    all_s = sum(lost for found in gaps.values() for *_, lost in found) or 1.0
    for what in sorted({fault.what for fault in story.faults}):
        mine = {job: [gap for gap in found if gap[0] == what] for job, found in gaps.items()}
        longest = [span([gap for _, gap, _ in found], ".1f") for found in mine.values()]
        lost_s = [[lost for *_, lost in found] for found in mine.values()]
        means = "; ".join(f"{statistics.mean(each):.1f}" for each in lost_s)
        share = sum(map(sum, lost_s)) / all_s
        table.add_row(what, str(len(lost_s[0])), *longest, means, f"{share:.0%}")
    Console(width=120).print(table)
    print(f"load: {span(story.loads, '.1f')} on {os.cpu_count()} CPUs")
    print(f"after the last fault the jobs trained on for {story.finished_s:.0f} s, to their end")
    for job, record in story.records.items():
        used = add_up([read_goodput(item) for item in story.goodput[job]])
        total_ns = sum(used.values()) or 1
        lost = sum(used.get(use, 0) for use in LOST) / total_ns
        end_s = max((at_s for at_s, _, _ in story.steps[job]), default=math.inf)
        limits = unknown_s(story.faults, job) / (end_s - story.begin_s)
        done = sum(len(batch) for batch in record.batches)
        print(f"{job}: {in_parts(used)}")
        print(
            f"{job}: {lost:.1%} of {total_ns / 6e10:.0f} minutes of the nodes re-forming or "
            f"repeating (limits alone, of leases, links and hangs: {limits:.1%}); "
            f"{len(record.batches)} revisions, {done} changes, "
            f"{len(record.manifests)} checkpoints, {len(record.exits)} agents ended"
        )
        print(
            f"{job}: {{1}} of {{0}} starts of a worker in the same process".format(
                *story.starts[job]
            )
        )
        for problem in story.problems[job]:
            print(f"{job}: BROKEN: {problem}")
        if not story.problems[job]:
            print(f"{job}: {verdict(record, complete=story.reference is not None)}")
    if story.reference is not None:
        print(f"{story.reference.steps} steps, weight hash {story.reference.final_hash}")


def verdict(record: JobRecord, *, complete: bool) -> str:
    """What has held; of a run that was interrupted, what was judged and what was not."""
    if complete:
        return "every promise has held"
    judged = {
        "revisions of etcd": len(record.batches),
        "checkpoints on disk against etcd": len(record.manifests),
        "ends of agents": len(record.exits),
    }
    found = ", ".join(f"{count} {what}" for what, count in judged.items() if count)
    held = f"no promise is broken in {found}" if found else "nothing was there to be judged"
    return f"interrupted: {held}; not judged: the weights, the ledger of samples, the end"


def span(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"
