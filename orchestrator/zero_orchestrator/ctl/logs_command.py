"""`zero-ctl logs`: what the workers of a job print, on all nodes.

The agents keep the last output of their workers in memory and send it when asked; an agent that
ends leaves the last of it in etcd.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.text import Text

from zero_contract.decoding import MalformedError, decode
from zero_contract.exit_codes import CtlExit
from zero_contract.values import whole
from zero_orchestrator.ctl.views import View
from zero_orchestrator.errors import LeaseLost, StoreUnavailable
from zero_orchestrator.observe import queries, status
from zero_orchestrator.observe.events import output_prefix
from zero_orchestrator.observe.queries import Answer, Asker
from zero_orchestrator.observe.status import JobStatus, NoSuchJob, NoSuchNode
from zero_orchestrator.store.kv import KeyValueStore

LINES = 100
WAIT_S = 5.0
FOLLOW_S = 0.5
"""Seconds between two questions of `--follow`, or `FOLLOW_PER_NODE_S` times the number of nodes if
that is longer."""
FOLLOW_PER_NODE_S = 0.05
"""Seconds between two questions of `--follow` to all nodes together."""
OUTAGE_S = 30.0
"""`--follow` continues through an outage of etcd of up to this many seconds."""
LEAVING_S = 3.0
"""How long `--follow` waits for the last output of a node that has gone; a killed one has none."""
_ALL = 1 << 40  # lines; more than any agent keeps
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("job", nargs="?", help=status.OR_NEWEST)
    parser.add_argument("--rank", type=int, metavar="N", help="only the worker with this rank")
    parser.add_argument(
        "--follow", "-f", action="store_true", help="print new output until the job ends"
    )
    text = f"number of last lines of each worker to print first (default {LINES})"
    lines = whole(": write a number of lines, such as 100")
    parser.add_argument("--lines", "-n", type=lines, default=LINES, metavar="N", help=text)


def run(args: argparse.Namespace, store: KeyValueStore, view: View) -> int:
    """Print the output; TOO_LATE if an agent does not answer.

    Raises:
        NoSuchJob: There is no such job.
        NoSuchNode: No live node has the rank.
    """
    job = status.find(store, args.job or status.newest_job(status.read_all(store)).job)
    reader = _Reader(store, job.job, view, rank=args.rank, lines=args.lines)
    if not job.live_nodes:
        answers = reader.left()
        reader.show(answers)
        if not answers and not args.follow:
            view.report(
                f"no agent of job {job.job} is alive, and none has left output in etcd within the "
                "last hour; the directory of --log-dir on the nodes has all of it"
            )
        if job.ended or not args.follow:
            return CtlExit.OK
    if args.follow:
        reader.follow()
        return CtlExit.OK
    with Asker(store, job.job) as asker:
        missing = reader.ask(asker, _asked(job, args.rank))
    for node in missing:
        view.report(f"node {node}: no answer within {WAIT_S:g} s")
    return CtlExit.TOO_LATE if missing else CtlExit.OK


def _asked(job: JobStatus, rank: int | None) -> Sequence[str]:
    """The nodes to ask: all that are alive, or the one that has the rank."""
    return job.live_nodes if rank is None else status.choose_members(job, rank)


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """One line that a worker has printed."""

    job: str
    """Name of the job."""
    node: str
    time: float
    """Clock of the node when it read the line, in seconds since the epoch."""
    round: int
    """Round in which the worker ran."""
    rank: int
    """Rank of the worker in that round."""
    stream: str
    """`stdout` or `stderr`."""
    text: str
    """The line without its end."""


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """What a worker has printed, in the answer of an agent."""

    number: int
    time: float
    round: int
    rank: int
    stream: str
    text: str


@dataclass(frozen=True, kw_only=True)
class _Output:
    """The answer of an agent."""

    agent: str
    number: int
    chunks: tuple[_Chunk, ...]
    lost: bool


@dataclass(frozen=True)
class _Cursor:
    """The position in a node's output up to which it was shown."""

    agent: str
    number: int


class _Reader:
    """Reads the output of nodes, and shows each line once."""

    def __init__(
        self, store: KeyValueStore, job: str, view: View, *, rank: int | None, lines: int
    ) -> None:
        self._store, self._job, self._view = store, job, view
        self._rank, self._lines = rank, lines
        self._cursors: dict[str, _Cursor] = {}
        self._gone_s: dict[str, float] = {}
        self._begun = False
        self._answered_s = time.monotonic()

    def ask(self, asker: Asker, nodes: Sequence[str]) -> list[str]:
        """Show what is new on some nodes; returns those that have not answered."""
        arguments = {}
        for node in nodes:
            cursor = self._cursors.get(node, _Cursor("", 0))
            # --lines is about what was printed before: later everything that is new is shown.
            lines = _ALL if self._begun else self._lines
            asked = {"agent": cursor.agent, "after": cursor.number, "lines": lines}
            arguments[node] = {**asked, "rank": self._rank}
        number = asker.ask("logs", arguments, within_s=WAIT_S)
        missing, found = set(nodes), []
        for answer in asker.answers(WAIT_S) if nodes else ():
            # The answer to the question before may come late.
            if answer.number == number and answer.node in missing:
                missing.discard(answer.node)
                found.append(answer)
            if not missing:
                break
        self.show(found)
        return sorted(missing)

    def left(self) -> list[Answer]:
        """The output that agents which have ended have left in etcd."""
        found = []
        for item in self._store.range(output_prefix(self._job)).items:
            with contextlib.suppress(ValueError):  # of another version
                found.append(queries.unpack(item.value))
        return found

    def show(self, answers: Iterable[Answer]) -> None:
        """Show what has not been shown, in the order of the nodes' clocks."""
        chunks: list[tuple[str, _Chunk]] = []
        for answer in answers:
            if answer.problem:
                self._view.report(f"node {answer.node}: {answer.problem}")
                continue
            try:
                output = decode(_Output, answer.record, "its answer cannot be read")
            except MalformedError as error:
                self._view.report(f"node {answer.node}: {error}")
                continue
            cursor = self._cursors.get(answer.node)
            # Another agent process, after a restart, numbers its output from the beginning.
            shown = cursor.number if cursor is not None and cursor.agent == output.agent else 0
            first = output.chunks[0].number if output.chunks else output.number
            if output.lost and shown and first > shown + 1:
                text = "output is missing here; it came faster than etcd could carry it"
                self._view.report(f"node {answer.node}: {text}")
            chunks += [(answer.node, one) for one in output.chunks if one.number > shown]
            self._cursors[answer.node] = _Cursor(output.agent, output.number)
        for node, chunk in sorted(chunks, key=lambda one: one[1].time):
            if self._rank in (None, chunk.rank):
                facts = {of: getattr(chunk, of) for of in ("time", "round", "rank", "stream")}
                for line in chunk.text.splitlines():
                    its = LogLine(job=self._job, node=node, **facts, text=line)
                    self._view.record(dataclasses.asdict(its))
                    colour = _COLOURS[chunk.rank % len(_COLOURS)]
                    self._view.line(Text.assemble((f"[rank{chunk.rank}]: ", colour), line))
        self._begun = True

    def follow(self) -> None:
        """Show what the workers print until the job ends.

        Raises:
            StoreUnavailable: etcd has not answered for `OUTAGE_S`.
            NoSuchNode: At the beginning no live node has the rank.
        """
        while True:
            try:
                with Asker(self._store, self._job) as asker:
                    while not self._follow(asker):
                        pass
                return
            except NoSuchJob:  # its keys have been deleted
                return
            except (StoreUnavailable, LeaseLost):
                if time.monotonic() - self._answered_s > OUTAGE_S:
                    raise
                time.sleep(FOLLOW_S)

    def _follow(self, asker: Asker) -> bool:
        """Ask once, and wait a moment; whether the job has ended and everything is shown."""
        job = status.read(self._store, self._job)
        now_s = self._answered_s = time.monotonic()
        nodes: Sequence[str] = ()
        # Between two rounds nobody has the rank.
        with contextlib.suppress(NoSuchNode, NoSuchJob):
            nodes = _asked(job, self._rank)
        self.ask(asker, nodes)
        gone = [node for node in self._cursors if node not in job.live_nodes]
        # What their workers have printed last may be in etcd.
        if gone:
            self.show(one for one in self.left() if one.node in gone)
        for node in gone:
            # An agent that ends writes its last output after its registration is gone.
            if now_s - self._gone_s.setdefault(node, now_s) > LEAVING_S:
                del self._cursors[node], self._gone_s[node]
        if job.ended and not job.live_nodes and not self._gone_s:
            return True
        time.sleep(max(FOLLOW_S, FOLLOW_PER_NODE_S * len(nodes)))
        return False
