"""`zero-ctl probe`: the network between the nodes of a job, measured by their agents."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from zero_contract.exit_codes import CtlExit
from zero_orchestrator.ctl.views import View
from zero_orchestrator.observe import links, status
from zero_orchestrator.observe.detectors.slow_link import IN_A_ROW, SlowLink, slow_links
from zero_orchestrator.observe.links import Link
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
    silent = [link for link in found if link.problem]
    slow = slow_links(found, {})
    for _ in range(IN_A_ROW - 1):  # one probe may be that of a moment
        if slow:
            again = {one.link.way for one in slow_links(links.probe(store, job.job, nodes), {})}
            slow = [one for one in slow if one.link.way in again]
    for text in conclusions(slow, silent, len(found)):
        view.report(text)
    return CtlExit.TOO_LATE if silent else CtlExit.OK


def conclusions(slow: Sequence[SlowLink], silent: Sequence[Link], links: int) -> list[str]:
    """The findings of a probe, in sentences; links that were not measured come last."""
    texts = [one.text for one in slow]
    if silent:
        which = ", ".join(f"{link.source} -> {link.target}" for link in silent)
        verb = "was" if len(silent) == 1 else "were"
        texts.append(f"{len(silent)} of {links} links {verb} not measured: {which}")
    return texts or ["all links answer, and none is much slower than the others"]
