"""`zero-ctl events`: the story of a job, all of it, of a time or node, or of one recovery."""

from __future__ import annotations

import argparse
import sys
import time

from zero_contract.exit_codes import CtlExit
from zero_contract.values import whole
from zero_orchestrator.arguments import seconds
from zero_orchestrator.ctl.views import View, age
from zero_orchestrator.errors import SpecError, StoreUnavailable
from zero_orchestrator.observe import events, status
from zero_orchestrator.observe.status import NoSuchJob
from zero_orchestrator.observe.story import recoveries, selected
from zero_orchestrator.store.kv import KeyValueStore


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("job", nargs="?", help=status.OR_NEWEST)
    parser.add_argument(
        "--follow", "-f", action="store_true", help="print new events until the job ends"
    )
    text = "only events of the last SECONDS, such as 30, 10m or 2h, by the clocks of the nodes"
    parser.add_argument("--since", type=seconds, metavar="SECONDS", help=text)
    parser.add_argument("--node", metavar="NODE", help="only events of this node")
    text = (
        "only the events of one recovery, from the first sign that a round ends to the start of "
        "the next workers, each with the time since the first; 1: the last recovery, 2: the one "
        "before (default of NUMBER: 1)"
    )
    place = whole(": write 1 for the last recovery, 2 for the one before", 1)
    parser.add_argument("--recovery", type=place, nargs="?", const=1, metavar="NUMBER", help=text)


def run(args: argparse.Namespace, store: KeyValueStore, view: View) -> int:
    """Print the events.

    Raises:
        NoSuchJob: There is no such job.
        SpecError: Two flags exclude each other.
    """
    if args.recovery is not None and (args.follow or args.since is not None or args.node):
        raise SpecError("--recovery shows all events of one recovery; leave out the other flags")
    job = args.job or status.newest_job(status.read_all(store)).job
    # Not among the events, which a program may read.
    if args.job is None:
        print(f"zero-ctl: events of job {job}", file=sys.stderr)
    since_s = None if args.since is None else time.time() - args.since
    if args.follow:
        _follow(store, job, view, since_s=since_s, node=args.node)
        return CtlExit.OK
    kept = events.read(store, job)
    if not kept:
        status.find(store, job)  # raises NoSuchJob, which names the jobs there are
    if args.recovery is not None:
        found = recoveries(kept)
        if len(found) < args.recovery:
            view.report(f"recoveries of job {job} among the events that are kept: {len(found)}")
            return CtlExit.USAGE
        recovery = found[-args.recovery]
        for event, offset_s in zip(recovery.events, recovery.offsets_s, strict=True):
            view.event(event, offset_s)
        return CtlExit.OK
    for one in selected(kept, since_s=since_s, node=args.node):
        view.event(one)
    newest_s = kept[-1].record.get("time") if kept else None
    view.report(
        f"the newest event was {age(newest_s)}" if kept else f"no event of job {job} is kept"
    )
    return CtlExit.OK


def _follow(
    store: KeyValueStore, job: str, view: View, *, since_s: float | None, node: str | None
) -> None:
    for event in events.follow(store, job):
        if event is not None:
            for one in selected([event], since_s=since_s, node=node):
                view.event(one)
            continue
        # Asked only while no event comes: a job that ends has told of it before.
        try:
            now = status.read(store, job)
        except StoreUnavailable:  # the watch survives an outage, and shows then what was missed
            continue
        except NoSuchJob:  # it existed, and its keys have been deleted
            return
        if now.ended and not now.live_nodes:  # no agent is left to write an event
            return
