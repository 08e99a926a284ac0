"""`zero-ctl probe`: the network between the nodes of a job, measured by their agents."""

from __future__ import annotations

import argparse
import dataclasses

from zero_contract.exit_codes import CtlExit
from zero_orchestrator.ctl import links, status
from zero_orchestrator.ctl.slow_link import slow_links
from zero_orchestrator.ctl.views import View
from zero_orchestrator.store.kv import KeyValueStore


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("job", nargs="?", help="name of the job (default: the running one)")


def run(args: argparse.Namespace, store: KeyValueStore, view: View) -> int:
    """Print the links and which of them are slow; TOO_LATE if some link was not measured.

    Raises:
        NoSuchJob: There is no such job, or it has no live agent.
    """
    job = status.find(store, args.job)
    nodes = status.choose_members(job, None)
    if len(nodes) < 2:
        view.report(f"job {job.job} runs on {nodes[0]} alone: there is no network to probe")
        return CtlExit.OK
    found = links.probe(store, job.job, nodes)
    for link in found:
        view.record({"job": job.job, **dataclasses.asdict(link)})
        view.line(f"{link.source} -> {link.target}: {link.problem or link.figures}")
    slow = slow_links(found, {})
    for one in slow:
        view.report(one.text)
    if not slow:
        view.report("no link is much slower than the others")
    return CtlExit.TOO_LATE if any(link.problem for link in found) else CtlExit.OK
