"""`zero-ctl top`: a job live: its status, its loss and its events; what does not fit scrolls."""

from __future__ import annotations

import argparse
import math
import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Sequence
from itertools import chain
from statistics import fmean
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment, SegmentLines
from rich.text import Text

from zero_contract.exit_codes import CtlExit
from zero_orchestrator.arguments import seconds
from zero_orchestrator.ctl.views import View, event_line, status_head, status_tables
from zero_orchestrator.errors import SpecError
from zero_orchestrator.observe import events, status
from zero_orchestrator.observe.events import Event
from zero_orchestrator.observe.history import History
from zero_orchestrator.observe.status import JobStatus
from zero_orchestrator.store import retry
from zero_orchestrator.store.kv import KeyValueStore

EVERY_S = 1.0
OUTAGE_S = 30.0
"""It continues through an outage of etcd of up to this many seconds."""
CURVE = 80
"""Most characters of the curve of the loss."""
_BARS = "▁▂▃▄▅▆▇█"
_LOSS = "loss        "
EVENTS = 200
"""Most events that are shown, the newest first."""
NEWEST = 5
"""Events above the tables."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("job", nargs="?", help="name of the job (default: the running one)")
    text = f"seconds between two refreshes (default {EVERY_S:g})"
    parser.add_argument("--every", type=seconds, default=EVERY_S, metavar="SECONDS", help=text)


def run(args: argparse.Namespace, store: KeyValueStore, view: View) -> int:
    """Show the job until it ends, or until `q` or Ctrl-C.

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
    top, quits = 0, False
    with Live(console=console, auto_refresh=False, screen=True) as live, Keyboard() as keyboard:
        while not job.ended and not quits:
            shown = screen(job, *retry.within(OUTAGE_S)(_read, store, job.job))
            # With --every 0 it would read etcd without a pause.
            until_s = time.monotonic() + max(args.every, 0.1)
            key: str | None = ""
            while key is not None and not quits:
                # At each key, and without another look at the job.
                lines = console.render_lines(shown, pad=False)
                top = scrolled(top, key, len(lines), console.height - 1)
                live.update(window(lines, top, console.height - 1), refresh=True)
                key = keyboard.key(until_s - time.monotonic())
                quits = key == "q"
            job = retry.within(OUTAGE_S)(status.read, store, job.job)
    view.status(job)  # what stays on the terminal
    return CtlExit.OK


def _read(store: KeyValueStore, job: str) -> tuple[History, Sequence[Event]]:
    return events.read_history(store.get(events.history_key(job))), events.read(store, job)


def screen(job: JobStatus, history: History, told: Sequence[Event]) -> RenderableType:
    """All that is shown, from what changes most to what is looked up."""
    # The newest first: on a small terminal it is the line below the curve.
    newest: list[RenderableType] = [event_line(event) for event in reversed(told[-EVENTS:])]
    losses = [point.loss for point in history.points if point.loss is not None]
    parts = [[status_head(job), Curve(losses)], newest[:NEWEST], [status_tables(job)]]
    parts.append(newest[NEWEST:])
    return Group(*chain.from_iterable([*part, ""] for part in parts if part))


class Curve:
    """The curve of the loss on one line, however short."""

    def __init__(self, losses: Sequence[float]) -> None:
        self._losses = losses

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(1, min(CURVE, options.max_width - len(_LOSS)))
        yield Text.assemble((_LOSS, "bold"), sparkline(self._losses, width) or "not known yet")


# ---- scrolling ----

Lines = Sequence[list[Segment]]


def scrolled(top: int, key: str, lines: int, height: int) -> int:
    """The first line that is shown after a key; "": the lines have changed."""
    page = max(1, height - 1)
    moves = {"up": -1, "down": 1, "page up": -page, "page down": page, "home": -lines, "end": lines}
    return max(0, min(top + moves.get(key, 0), lines - height))


def window(lines: Lines, top: int, height: int) -> RenderableType:
    """The lines that fit, and below them what there is beyond, and the keys."""
    shown = list(lines[top : top + height])
    text = "q quits"
    if len(lines) > height:
        text = f"{top + 1}-{top + len(shown)} of {len(lines)} lines; arrows, page keys; {text}"
    return Group(
        SegmentLines(shown, new_lines=True),
        Text(text, style="reverse", overflow="ellipsis", no_wrap=True),
    )


_KEYS = {
    **dict.fromkeys(("\x1b[A", "\x1bOA", "k"), "up"),
    **dict.fromkeys(("\x1b[B", "\x1bOB", "j", "\r", "\n"), "down"),
    **dict.fromkeys(("\x1b[5~", "b"), "page up"),
    **dict.fromkeys(("\x1b[6~", " "), "page down"),
    **dict.fromkeys(("\x1b[H", "\x1bOH", "\x1b[1~", "g"), "home"),
    **dict.fromkeys(("\x1b[F", "\x1bOF", "\x1b[4~", "G"), "end"),
    "q": "q",
}
"""What a terminal sends for a key -> the key; those of `less` as well."""
_SENT = re.compile("|".join(map(re.escape, sorted(_KEYS, key=len, reverse=True))))


class Keyboard:
    """The keys that are pressed on the terminal of stdin; none if it is none. A context manager."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._before: list[Any] = []
        self._pressed: list[str] = []

    def __enter__(self) -> Keyboard:
        if self._fd is not None:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)  # keys without Enter; Ctrl-C still is a signal
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            # After what is still being written: else the last lines are drawn in the old mode.
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def key(self, within_s: float) -> str | None:
        """The next key, or None if none is pressed in time."""
        until_s = time.monotonic() + within_s
        while not self._pressed:
            left_s = max(0.0, until_s - time.monotonic())
            if self._fd is None:
                time.sleep(left_s)
                return None
            if not select.select([self._fd], [], [], left_s)[0]:
                return None
            sent = os.read(self._fd, 1024)
            if not sent:  # the terminal is gone
                return "q"
            self._pressed = [_KEYS[key] for key in _SENT.findall(sent.decode(errors="replace"))]
        return self._pressed.pop(0)


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as a curve of one line, from the lowest to the highest; means if they are many."""
    per_bar = max(1, math.ceil(len(values) / width))
    starts = range(0, len(values), per_bar)
    means = [fmean(values[start : start + per_bar]) for start in starts]
    low, high = min(means, default=0.0), max(means, default=0.0)
    last = len(_BARS) - 1
    return "".join(_BARS[round((mean - low) / ((high - low) or 1.0) * last)] for mean in means)
