"""`zero-ctl top`: a job on one screen, live: its status, its speed and its last events."""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from zero_contract.exit_codes import CtlExit
from zero_contract.values import in_words
from zero_orchestrator.arguments import seconds
from zero_orchestrator.ctl import events, status
from zero_orchestrator.ctl.events import Event
from zero_orchestrator.ctl.status import JobStatus
from zero_orchestrator.ctl.views import View, event_line, status_page
from zero_orchestrator.errors import SpecError
from zero_orchestrator.store import retry
from zero_orchestrator.store.kv import KeyValueStore

EVERY_S = 1.0
OUTAGE_S = 30.0
"""It continues through an outage of etcd of up to this many seconds."""
SPEED_S = 60.0
"""The speed is that of the last seconds, as many as these."""
LOSSES = 60
"""Number of losses in the curve, one of each refresh that shows a new step."""
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
    job, speed = status.find(store, args.job), Speed()
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            speed.add(job, time.monotonic())
            told = retry.within(OUTAGE_S)(events.read, store, job.job)
            live.update(screen(job, speed, told, console.height), refresh=True)
            if job.ended:
                break
            time.sleep(max(args.every, 0.1))
            job = retry.within(OUTAGE_S)(status.read, store, job.job)
    view.status(job)  # what stays on the terminal
    return CtlExit.OK


@dataclass(frozen=True)
class _Seen:
    at_s: float
    step: int


class Speed:
    """Steps per second and the last losses, from the steps that nodes report."""

    def __init__(self) -> None:
        self._seen: deque[_Seen] = deque()
        self.losses: deque[float] = deque(maxlen=LOSSES)

    def add(self, job: JobStatus, at_s: float) -> None:
        """Note the step of a status; a step that is lower than the last one begins anew."""
        rows = [row for row in job.members if row.step is not None]
        first = max(rows, key=lambda row: row.step or 0, default=None)
        if first is None or first.step is None:
            return
        if self._seen and first.step == self._seen[-1].step:
            return
        if self._seen and first.step < self._seen[-1].step:  # after a failure
            self._seen.clear()
        self._seen.append(_Seen(at_s, first.step))
        if first.loss is not None:
            self.losses.append(first.loss)
        while len(self._seen) > 2 and at_s - self._seen[0].at_s > SPEED_S:
            self._seen.popleft()

    def steps_per_s(self, now_s: float) -> float | None:
        """Steps per second of the last `SPEED_S`; None: not known."""
        if len(self._seen) < 2:
            return None
        first, last = self._seen[0], self._seen[-1]
        waited_s = max(now_s, last.at_s) - first.at_s
        return (last.step - first.step) / waited_s if waited_s > 0 else None


def screen(job: JobStatus, speed: Speed, told: Sequence[Event], height: int) -> RenderableType:
    """All that is shown: as many events as fit below the rest."""
    parts: list[RenderableType] = [status_page(job), ""]
    rate = speed.steps_per_s(time.monotonic())
    words = "speed not known yet" if rate is None else _rate(rate)
    curve = f"   loss {sparkline(speed.losses)}" if speed.losses else ""
    parts += [Text.assemble(("speed      ", "bold"), words, curve), ""]
    used = 16 + len(job.members) + len(job.spares) + len(job.exclusions)
    count = max(_LEAST_EVENTS, height - used - 1)
    parts += [event_line(event) for event in told[-count:]]
    return Group(*parts)


def _rate(rate: float) -> str:
    if 0 < rate < 0.5:
        return f"a step in {in_words(1 / rate)}"
    return f"{rate:.2f} steps/s"


def sparkline(values: Sequence[float]) -> str:
    """The values as a curve of one line, from the lowest to the highest."""
    finite = [value for value in values if abs(value) < float("inf")]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    width = (high - low) or 1.0
    last = len(_BARS) - 1
    return "".join(
        _BARS[round((value - low) / width * last)] if abs(value) < float("inf") else "!"
        for value in values
    )
