"""The output of `zero-ctl`: tables for people, or one JSON object a line for tools."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.filesize import decimal
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from zero_contract.decoding import line_of
from zero_contract.values import in_words
from zero_orchestrator.observe.events import Event
from zero_orchestrator.observe.goodput import from_record, in_parts, total_ns
from zero_orchestrator.observe.history import Saved
from zero_orchestrator.observe.pace import Quantiles, Speed
from zero_orchestrator.observe.stacks import in_ranges
from zero_orchestrator.observe.status import (
    LOST,
    UNREADABLE,
    Condition,
    JobStatus,
    NodeRow,
    slowest_ranks,
)

_PIPE_COLUMNS = 250
_WRONG = frozenset({"saves", "excluded", "set aside"})
"""Facts that are shown only if something is wrong."""
_COMMAND_CHARACTERS = 1000
SLOWEST = 8
"""Most ranks whose steps are shown."""
_STYLES = {
    "ACTIVE": "green",
    "FORMING": "yellow",
    LOST: "bold red",
    UNREADABLE: "red",
    "DONE": "bold green",
    "FAILED": "bold red",
    "STOPPED": "bold",
    Condition.RUNNING: "green",
    Condition.DRAINING: "yellow",
    Condition.LEFT: "yellow",
    Condition.FAILED: "red",
    Condition.LOST: "red",
    Condition.EXCLUDED: "red",
    Condition.UNHEALTHY: "red",
}
_EVENT_STYLES = {
    "interrupt": "red",
    "fail": "red",
    "give up": "red",
    "exit": "red",
    "activate": "green",
}


class View(Protocol):
    """An output format of `zero-ctl`."""

    def jobs(self, jobs: Sequence[JobStatus]) -> None:
        """Print all jobs, a line each."""

    def status(self, status: JobStatus) -> None:
        """Print the status of one job."""

    def watch(self, statuses: Iterable[JobStatus]) -> None:
        """Print each new status of one job."""

    def event(self, event: Event, offset_s: float | None = None) -> None:
        """Print one event; with an offset, the time since the first event of its recovery."""

    def record(self, record: Mapping[str, Any]) -> None:
        """Print a record for tools; people get its `line`s."""

    def line(self, text: str | Text) -> None:
        """Print a line for people; tools get its `record`."""

    def report(self, sentence: str) -> None:
        """Print what a command has done."""


class JsonView:
    """JSON for tools: one object a line on stdout; sentences go to stderr."""

    def jobs(self, jobs: Sequence[JobStatus]) -> None:
        """As `View.jobs`."""
        self.watch(jobs)

    def status(self, status: JobStatus) -> None:
        """As `View.status`."""
        print(status.to_json(), flush=True)

    def watch(self, statuses: Iterable[JobStatus]) -> None:
        """As `View.watch`."""
        for status in _changes(statuses):
            self.status(status)

    def event(self, event: Event, offset_s: float | None = None) -> None:
        """As `View.event`."""
        offset = {} if offset_s is None else {"offset_s": round(offset_s, 3)}
        print(line_of({"revision": event.revision, **event.record, **offset}), flush=True)

    def record(self, record: Mapping[str, Any]) -> None:
        """As `View.record`."""
        print(line_of(record), flush=True)

    def line(self, text: str | Text) -> None:
        """As `View.line`."""

    def report(self, sentence: str) -> None:
        """As `View.report`."""
        print(sentence, file=sys.stderr)


class TableView:
    """Tables and sentences for people."""

    def __init__(self) -> None:
        # Names and reasons are shown as they are: rich would read `[...]` in them as markup.
        self._console = Console(markup=False, emoji=False, highlight=False)
        # Else rich takes 80 columns, and folds the cells.
        if not self._console.is_terminal:
            self._console.width = _PIPE_COLUMNS

    def jobs(self, jobs: Sequence[JobStatus]) -> None:
        """As `View.jobs`."""
        self._console.print(_jobs_table(jobs))

    def status(self, status: JobStatus) -> None:
        """As `View.status`."""
        self._console.print(status_page(status))

    def watch(self, statuses: Iterable[JobStatus]) -> None:
        """As `View.watch`; a terminal shows only the last status, with ages that grow."""
        if not self._console.is_terminal:
            for status in _changes(statuses):
                self.status(status)
            return
        # Drawn as the statuses come, and not four times a second by a thread of rich.
        with Live(console=self._console, auto_refresh=False) as live:
            for status in statuses:
                live.update(status_page(status), refresh=True)

    def event(self, event: Event, offset_s: float | None = None) -> None:
        """As `View.event`."""
        self._console.print(event_line(event, offset_s), soft_wrap=True)

    def record(self, record: Mapping[str, Any]) -> None:
        """As `View.record`."""

    def line(self, text: str | Text) -> None:
        """As `View.line`."""
        self._console.print(text, soft_wrap=True)

    def report(self, sentence: str) -> None:
        """As `View.report`."""
        self._console.print(sentence, soft_wrap=True)


def event_line(event: Event, offset_s: float | None = None) -> Text:
    """An event for people; with an offset, the time since the first event of its recovery."""
    record = event.record
    at = datetime.fromtimestamp(record.get("time", 0.0), tz=UTC).astimezone()
    name = str(record.get("event", "?"))
    return Text.assemble(
        (f"{at:%m-%d %H:%M:%S}.{at.microsecond // 1000:03d}{at:%z}", "dim"),
        ("" if offset_s is None else f"  {offset_s:+9.3f} s", "bold"),
        f"  round {record.get('round', '-')!s:3}",
        (f" {record.get('node', '-')!s:12}", "cyan"),
        (f" {name:10}", _EVENT_STYLES.get(name, "bold")),
        f" {record.get('text', '')}",
    )


def _changes(statuses: Iterable[JobStatus]) -> Iterator[JobStatus]:
    """The statuses that differ from the one before."""
    last = ""
    for status in statuses:
        if (text := status.to_json()) != last:  # a loss that is no number differs from itself
            yield status
        last = text


def age(time_s: float | None) -> str:
    """The time since `time_s` (seconds since the epoch), such as `31 minutes ago`."""
    if time_s is None:
        return "some time ago"
    return f"{in_words(time.time() - time_s)} ago"


def _styled(word: str) -> Text:
    return Text(word, style=_STYLES.get(word, ""))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column)
    return table


class Fitted:
    """A table with the columns for which a line of the terminal has room; it names the others."""

    def __init__(
        self, *columns: str, least: Sequence[str] = (), optional: Sequence[str] = ()
    ) -> None:
        """No row yet; `least` are left out first, `optional` where no row has a value."""
        self._columns, self._least, self._optional = columns, least, optional
        self._rows: list[tuple[str | Text, ...]] = []

    def add_row(self, *cells: str | Text) -> None:
        """Add a row, with a cell for each column; "-" and "" stand for no value."""
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = zip(*self._rows, strict=True) if self._rows else ((),) * len(self._columns)
        empty = {
            name
            for name, of in zip(self._columns, cells, strict=True)
            if name in self._optional and all(str(cell) in {"", "-"} for cell in of)
        }
        # One column fewer at a time, until the table fits, or none is left to be left out.
        for count in range(len(self._least) + 1):
            left_out = [name for name in self._least[:count] if name not in empty]
            table = self._with({*left_out, *empty})
            # Measured as if there were room: rich would fold the cells, and report that they fit.
            if Measurement.get(console, options.update_width(10_000), table).maximum <= (
                options.max_width
            ):
                break
        yield table
        if left_out:
            yield Text(f"no room for: {', '.join(left_out)}", style="dim")

    def _with(self, left_out: set[str]) -> Table:
        places = [i for i, name in enumerate(self._columns) if name not in left_out]
        table = _table(*(self._columns[place] for place in places))
        for row in self._rows:
            table.add_row(*(row[place] for place in places))
        return table


def _jobs_table(jobs: Sequence[JobStatus]) -> Fitted:
    columns = ("job", "state", "since", "owner", "round", "nodes", "step", "now")
    table = Fitted(*columns, least=("owner", "round", "now", "nodes", "since"))
    for job in jobs:
        state = _styled(job.state or "not begun")
        since = "-" if job.state_time_s is None else age(job.state_time_s)
        of_round = sum(row.alive for row in job.members)
        others = sum(row.alive for row in job.spares)
        nodes = f"{of_round}{f' + {others}' if others else ''} ({_bounds(job)})"
        steps = [row.step for row in job.members if row.step is not None]
        step = str(max(steps)) if steps else "-"
        owner = job.owner or "-"
        table.add_row(job.job, state, since, owner, str(job.round), nodes, step, _now(job))
    return table


def _now(status: JobStatus) -> str:
    """The present activity of a job; if it is LOST, also how long ago an agent was last alive."""
    if status.state != LOST or status.seen_time_s is None:
        return status.now
    return f"{status.now}; one was alive {age(status.seen_time_s)}"


def status_page(status: JobStatus) -> RenderableType:
    """The status of a job for people."""
    return Group(status_head(status), "", status_tables(status))


def status_head(status: JobStatus) -> RenderableType:
    """The facts about a job as a whole, a line for each."""
    title = Text.assemble("job ", (status.job, "bold"), ": ", _styled(status.state or "not begun"))
    facts = _table("", "")
    facts.show_header = False
    for name, text in (*_facts_of_round(status), *_facts_of_training(status)):
        facts.add_row(Text(name, style="bold red" if name in _WRONG else ""), text)
    for verdict in status.verdicts:
        facts.add_row(Text(verdict.kind, style="bold red"), verdict.text)
    if status.owner:
        facts.add_row("owner", status.owner)
    command = " ".join(status.command)
    # A command may have thousands of arguments.
    if (more := len(command) - _COMMAND_CHARACTERS) > 0:
        command = f"{command[:_COMMAND_CHARACTERS]}... ({more:,} more characters)"
    facts.add_row("command", command)
    return Group(title, facts)


def status_tables(status: JobStatus) -> RenderableType:
    """The nodes of a job, and its slowest ranks."""
    tables: list[RenderableType] = [_nodes_table((*status.members, *status.spares))]
    if len(ranks := slowest_ranks(status)) > 1:
        slowest = Fitted("rank", "node", "steps", "p50", "p90", "p99", least=("steps", "p90"))
        for rank, node, of in ranks[:SLOWEST]:
            times = (f"{took_s:.3g} s" for took_s in (of.p50_s, of.p90_s, of.p99_s))
            slowest.add_row(rank, node, str(of.count), *times)
        tables += ["", slowest]
    if len(ranks) > SLOWEST:
        text = f"the {SLOWEST} slowest of {len(ranks)} ranks; --json has all"
        tables.append(Text(text, style="dim"))
    return Group(*tables)


def _facts_of_round(status: JobStatus) -> Iterator[tuple[str, str]]:
    """The facts about the round: its state, its nodes, and the cost of failures."""
    yield "round", f"{status.round}, world size {status.world_size}"
    yield "now", _now(status)
    if status.cause:
        yield "changed", f"{age(status.state_time_s)}: {status.cause}"
    if status.stop is not None and not status.ended:
        yield "stop", status.stop
    members, others = len(status.members), len(status.spares)
    yield "nodes", f"{members} in the round ({_bounds(status)} wanted), {others} outside of it"
    # The failure that ends a job is one more than the budget has.
    spent = min(status.restarts_spent, status.max_restarts)
    text = f"{spent} of {status.max_restarts} spent"
    if status.restarts_spent > status.max_restarts:
        text += ", and one more failure has ended the job"
    elif status.restarts != status.restarts_spent:
        text += f", {status.restarts} in all"
    if status.restarts_without_progress:
        text += f"; the last {status.restarts_without_progress} without a new step"
    yield "restarts", text
    for exclusion in status.exclusions:
        left_s = status.excluded_left_s.get(exclusion.host)
        yield "excluded", f"{exclusion}{f'; it ends in {left_s} s' if left_s is not None else ''}"
    for one in status.aside:
        yield "set aside", f"{one}"


def _facts_of_training(status: JobStatus) -> Iterator[tuple[str, str]]:
    """The facts about the training: its progress, its speed, and the use of the time."""
    if status.reduction:
        yield "reduction", f"{status.reduction}: the number of ranks changes the result"
    yield "checkpoint", _checkpoint(status.checkpoint, status.saved, status.last_save)
    if status.failing_saves is not None:
        yield "saves", status.failing_saves.in_words(None if status.ended else time.time())
    if status.in_memory is not None and not status.ended:
        # They are gone with the workers of an ended job.
        last = status.last_save_in_memory
        yield "in memory", _checkpoint(status.in_memory, status.kept, last)
    counts = ((status.samples, "samples"), (status.tokens, "tokens"))
    if consumed := [f"{count:,} {name}" for count, name in counts if count is not None]:
        yield "consumed", ", ".join(consumed)
    if status.speed is not None and not status.ended:
        yield "speed", speed_in_words(status.speed)
    if status.total_steps is not None and not status.ended:
        left = "" if status.left_s is None else f", {in_words(status.left_s)} at this speed"
        step = max((row.step for row in status.members if row.step is not None), default=0)
        yield "left", f"{max(0, status.total_steps - step):,} of {status.total_steps:,} steps{left}"
    if status.step_times is not None:
        yield "step time", f"{_in_quantiles(status.step_times)}, in this round"
    elif status.run_step_times is not None:
        yield "step time", f"{_in_quantiles(status.run_step_times)}, of one rank in all rounds"
    if status.time_ns:
        used_ns = from_record(status.time_ns)
        total = in_words(total_ns(used_ns) / 1e9)
        yield "goodput", f"{in_parts(used_ns)}; of {total} of all nodes"


def _bounds(status: JobStatus) -> str:
    return f"{status.min_nodes}:{status.max_nodes}"


def _checkpoint(latest: Mapping[str, Any] | None, count: int, last: Saved | None) -> str:
    """The newest checkpoint, and what the last save that has ended took."""
    if latest is None:
        return "none yet"
    text = f"step {latest['step']}, {latest.get('samples', 0)} samples ({latest.get('tag', '')})"
    if "time" in latest:
        text += f", {age(latest['time'])}"
    if last is not None:
        text += f"; {decimal(last.size_bytes)}, training waited {last.stall_s:.3g} s"
    return f"{text}; {count:,} in all" if count > 1 else text


def speed_in_words(speed: Speed) -> str:
    """Steps, samples and tokens per second, as far as they are known."""
    steps = f"{speed.steps:.2f} steps/s"
    if 0 < speed.steps < 0.5:
        steps = f"a step in {in_words(1 / speed.steps)}"
    others = ((speed.samples, "samples/s"), (speed.tokens, "tokens/s"))
    return ", ".join([steps, *(f"{value:,.0f} {name}" for value, name in others if value)])


def _in_quantiles(found: Quantiles) -> str:
    return f"p50 {found.p50_s:g} s, p90 {found.p90_s:g} s, p99 {found.p99_s:g} s"


def _nodes_table(rows: Sequence[NodeRow]) -> Fitted:
    columns = ("rank", "node", "state", "workers", "pids", "address", "host", "step", "reported")
    optional = ("pids", "host", "devices", "memory", "prepares")
    least = (
        *("pids", "devices", "host", "address", "workers"),
        *("memory", "loss", "reported", "prepares"),
    )
    more = ("loss", "memory", "prepares", "devices")
    table = Fitted(*columns, *more, least=least, optional=optional)
    for row in rows:
        ranks = "-"
        if row.first_rank is not None:
            ranks = in_ranges(range(row.first_rank, row.first_rank + row.slots))
        used = "-"
        if row.ram_used_bytes is not None and row.ram_budget_bytes is not None:
            used = f"{row.ram_used_bytes / (1 << 20):.1f} of {row.ram_budget_bytes >> 20} MiB"
        table.add_row(
            ranks,
            row.node,
            _styled(row.condition),
            str(row.slots),
            ", ".join(map(str, row.pids.values())) or "-",
            row.address,
            "-" if row.host == row.node else row.host,
            "-" if row.step is None else str(row.step),
            "-" if row.step_time_s is None else age(row.step_time_s),
            "-" if row.loss is None else f"{row.loss:.4f}",
            used,
            row.preparing or "-",
            row.devices or "-",
        )
    return table
