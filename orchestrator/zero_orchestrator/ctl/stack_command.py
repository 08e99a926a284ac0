"""`zero-ctl stack`: where every worker of a job is, equal stacks shown once."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence

from zero_contract.exit_codes import CtlExit
from zero_orchestrator.arguments import seconds
from zero_orchestrator.ctl.views import View
from zero_orchestrator.observe import queries, status
from zero_orchestrator.observe.stacks import RankStack, from_answer, groups, whose
from zero_orchestrator.observe.status import JobStatus
from zero_orchestrator.store.kv import KeyValueStore

WAIT_S = 5.0
NATIVE_WAIT_S = 60.0
"""py-spy reads the symbols of torch's libraries, which takes seconds of CPU."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("job", nargs="?", help="name of the job (default: the running one)")
    parser.add_argument("--rank", type=int, metavar="N", help="only the worker with this rank")
    parser.add_argument(
        "--threads", action="store_true", help="all threads, and not the main thread alone"
    )
    text = (
        "native frames as well; needs py-spy in the environment of the agents, and their right to "
        "trace processes (CAP_SYS_PTRACE)"
    )
    parser.add_argument("--native", action="store_true", help=text)
    text = f"seconds to wait for the answers (default {WAIT_S:g}; {NATIVE_WAIT_S:g} with --native)"
    parser.add_argument("--wait", type=seconds, default=0.0, metavar="SECONDS", help=text)


def run(args: argparse.Namespace, store: KeyValueStore, view: View) -> int:
    """Print the stacks; TOO_LATE if some worker has none.

    Raises:
        NoSuchJob: There is no such job, or it has no live agent.
        NoSuchNode: No live node has the rank.
    """
    job = status.find(store, args.job)
    nodes = status.choose_members(job, args.rank)
    within_s = args.wait or (NATIVE_WAIT_S if args.native else WAIT_S)
    arguments = {node: {"rank": args.rank, "native": args.native} for node in nodes}
    answers = queries.ask_each(store, job.job, "stack", arguments, within_s=within_s)
    found: list[RankStack] = []
    for node in nodes:
        answer = answers[node]
        if answer.problem:
            found.append(RankStack(rank=None, node=node, problem=answer.problem))
        found += from_answer(node, answer.record)
    for stack in found:
        view.record({"job": job.job, "round": job.round, **dataclasses.asdict(stack)})
    for line in _page(job, found, all_threads=args.threads):
        view.line(line)
    return CtlExit.TOO_LATE if any(stack.problem for stack in found) else CtlExit.OK


def _page(job: JobStatus, found: Sequence[RankStack], *, all_threads: bool) -> Iterator[str]:
    different = groups(found, all_threads=all_threads)
    shown = sum(len(group.members) for group in different)
    yield (
        f"job {job.job}, round {job.round}: the stacks of {shown} of {job.world_size} workers, "
        f"{len(different)} different; most recent call first"
    )
    for group in different:
        yield ""
        count = len(group.members)
        yield f"{count} worker{'s' if count > 1 else ''}: {whose(group.members)}"
        for thread in group.threads:
            if all_threads:
                yield f"  thread {thread.name}{' (main)' if thread.main else ''}"
            yield from (f"    {frame}" for frame in thread.frames)
            if not thread.frames:
                yield "    no Python frame"
    problems = [stack for stack in found if stack.problem]
    if problems:
        yield ""
    for stack in problems:
        who = f"node {stack.node}" if stack.rank is None else whose([stack])
        yield f"{who}: {stack.problem}"
