"""`zero-ctl top`: a job on one screen, live: its status, its loss and its last events."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from statistics import fmean

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from zero_contract.exit_codes import CtlExit
from zero_orchestrator.arguments import seconds
from zero_orchestrator.ctl import events, status
from zero_orchestrator.ctl.events import Event
from zero_orchestrator.ctl.history import History
from zero_orchestrator.ctl.status import JobStatus
from zero_orchestrator.ctl.views import SLOWEST, View, event_line, status_page
from zero_orchestrator.errors import SpecError
from zero_orchestrator.store import retry
from zero_orchestrator.store.kv import KeyValueStore

EVERY_S = 1.0
OUTAGE_S = 30.0
"""It continues through an outage of etcd of up to this many seconds."""
CURVE = 80
"""Most characters of the curve of the loss."""
_BARS = "▁▂▃▄▅▆▇█"
_LEAST_EVENTS = 5


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("job", nargs="?", help="name of the job (default: the running one)")
    text = f"seconds between two refreshes (default {EVERY_S:g})"
    parser.add_argument("--every", type=seconds, default=EVERY_S, metavar="SECONDS", help=text)


def run(args: argparse.Namespace, store: KeyValueStore, view: View) -> int:
    """Show the job until it ends, or until Ctrl-C.

    Raises:
        NoSuchJob: There is no such job.
        SpecError: stdout is no terminal.
    """
    console = Console(markup=False, emoji=False, highlight=False)
    if args.json or not console.is_terminal:
        raise SpecError(
            "top needs a terminal, and prints no JSON; `zero-ctl status --watch` prints each change"
        )
    job = status.find(store, args.job)
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            history, told = retry.within(OUTAGE_S)(_read, store, job.job)
            live.update(screen(job, history, told, console.height), refresh=True)
            if job.ended:
                break
            time.sleep(max(args.every, 0.1))
            job = retry.within(OUTAGE_S)(status.read, store, job.job)
    view.status(job)  # what stays on the terminal
    return CtlExit.OK


def _read(store: KeyValueStore, job: str) -> tuple[History, Sequence[Event]]:
    return events.read_history(store.get(events.history_key(job))), events.read(store, job)


def screen(job: JobStatus, history: History, told: Sequence[Event], height: int) -> RenderableType:
    """All that is shown: as many events as fit below the rest."""
    curve = sparkline([point.loss for point in history.points if point.loss is not None], CURVE)
    ranks = sum(len(row.ranks) for row in job.members)
    used = 18 + len(job.members) + len(job.spares) + len(job.exclusions)
    used += min(ranks, SLOWEST) + 3 if ranks > 1 else 0
    count = max(_LEAST_EVENTS, height - used)
    return Group(
        status_page(job),
        "",
        Text.assemble(("loss        ", "bold"), curve or "not known yet"),
        "",
        *(event_line(event) for event in told[-count:]),
    )


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as a curve of one line, from the lowest to the highest; means if they are many."""
    per_bar = max(1, math.ceil(len(values) / width))
    starts = range(0, len(values), per_bar)
    means = [fmean(values[start : start + per_bar]) for start in starts]
    low, high = min(means, default=0.0), max(means, default=0.0)
    last = len(_BARS) - 1
    return "".join(_BARS[round((mean - low) / ((high - low) or 1.0) * last)] for mean in means)
