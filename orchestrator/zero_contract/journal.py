"""The journal of a job: one event for each decision and each fault, with its reason.

Each event is a sentence in the log, for people, and a JSON object, for tools: in a file, if one is
given, and in the store (`events.Publisher`). `node` identifies an event's writer; `round`, or the
revision in the store, orders the events of several nodes; `time` is the node's wall clock, for
people only. A journal never stops a job.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zero_contract.decoding import line_of
from zero_contract.writer import Writer

log = logging.getLogger("zero")

LARGE_NODES = 64
"""In rounds of more nodes, the events of each node are too many for the store."""
FILE_BYTES = 64 << 20
"""A file of events that has reached this size becomes the older part, with `.1` in its name."""


class Retention(StrEnum):
    """How long an event is kept beyond this node's own file."""

    STORY = "story"
    """In the store, for long: what happened to the job, and why."""
    DETAIL = "detail"
    """In the store, until newer details replace it."""
    LOCAL = "local"
    """In this node's own file alone."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """The definition of one kind of event."""

    when: str
    """When it happens, in a sentence."""
    facts: tuple[str, ...] = ()
    """Fields of its record beside those that every event has."""
    story: bool = False
    """Always kept in the store for long: one agent writes it for all, or it is rare."""


_TRANSITION = ("nodes", "revision")
_END = (*_TRANSITION, "idle_s")
"""`idle_s`: seconds since the workers of the node that tells it have finished a step."""

EVENTS: Mapping[str, Event] = MappingProxyType(
    {
        # Transitions of the job, each written by the agent that made it.
        "open": Event(when="The job begins.", facts=_TRANSITION, story=True),
        "activate": Event(
            when="A round begins: its nodes and ranks are settled.", facts=_TRANSITION, story=True
        ),
        "yield": Event(
            when="The nodes of a round are asked to leave it at a step boundary, because another "
            "round is to begin.",
            facts=_TRANSITION,
            story=True,
        ),
        "form": Event(
            when="A round has ended without a failure, and the next one forms.",
            facts=_END,
            story=True,
        ),
        "interrupt": Event(
            when="A round has ended because of a failure, which costs one restart, and the next "
            "one forms.",
            facts=_END,
            story=True,
        ),
        "finish": Event(when="The job is done.", facts=_TRANSITION, story=True),
        "fail": Event(
            when="The job has failed: no restart is left.", facts=_TRANSITION, story=True
        ),
        "give up": Event(
            when="The job has failed early: too many restarts in a row finished no new step.",
            facts=_TRANSITION,
            story=True,
        ),
        "halt": Event(
            when="The job has stopped because of `zero-ctl stop`.", facts=_TRANSITION, story=True
        ),
        # What happens to one node.
        "drain": Event(when="A node begins to leave the job.", facts=("revision",), story=True),
        "dead": Event(
            when="The agent of a node is gone, and another agent has removed the node.", story=True
        ),
        "ring": Event(
            when="A node refuses connections but keeps its lease alive, so it is not removed."
        ),
        "lease": Event(when="A node's lease is in danger, or the node has registered again."),
        "health": Event(when="A node has become unhealthy, or healthy again."),
        "store": Event(
            when="etcd does not answer, refuses or is full, or (`away` is false) it works again. "
            "Workers continue. Of a long outage, etcd has the end alone, with its time.",
            facts=("away", "after_s"),
        ),
        "member": Event(
            when="A member of the job's own store begins, votes or is removed, or the agents are "
            "told where the members are.",
            story=True,
        ),
        "commit": Event(when="The commit of a checkpoint waits until etcd answers."),
        "save": Event(
            when="Checkpoints are not saved, or a script waits until its last one can be, or "
            "(`failed` is false) they are saved again.",
            facts=("step", "failed", "saves"),
            story=True,
        ),
        # What happens to the workers of one node.
        "start": Event(
            when="A node starts its workers of a round, of which `stay` are in the same process. "
            "Those of its last round have ended, or wait, since `stopped_s`, if it had one.",
            facts=("world_size", "stay", "stopped_s"),
        ),
        "worker": Event(when="A worker process runs.", facts=("rank", "pid")),
        "warm up": Event(
            when="Workers are started before their node takes part in a round, wait at their "
            "engine, or have ended before that.",
            facts=("rank", "pid"),
        ),
        "logs": Event(when="The workers' output goes to another directory."),
        "world size": Event(
            when="The world size has changed under a script that has neither the engine nor "
            "`zero_torch.protect`: its batch, schedule and order of samples are its own. Written "
            "once, by the node of rank 0.",
        ),
        "leave": Event(when="The workers are asked to leave at their next step boundary."),
        "restore": Event(
            when="The workers of a round have loaded a checkpoint. What they read of it has the "
            "digests in its manifest.",
            facts=("step", "tag", "in_memory", "load_s", "read_bytes"),
            story=True,
        ),
        "first step": Event(
            when="All workers of a node have finished their first step of a round. `ranks`: what "
            "each rank did since `start`, and the seconds that it took.",
            facts=("ranks",),
        ),
        "left": Event(when="A worker has left at a step boundary."),
        "stop": Event(when="The workers get a signal that ends them.", facts=("signal",)),
        "exit": Event(
            when="A worker, or the workers' store, has ended with an error. `symptom` marks a "
            "healthy worker that lost its peers.",
            facts=("rank", "pid", "symptom"),
        ),
        "hang": Event(
            when="A worker has taken no step for too long.", facts=("rank", "pid"), story=True
        ),
        "stuck": Event(
            when="No rank takes a step: which rank the others wait for, and where it is, or "
            "(`stuck` is false) steps are taken again.",
            facts=("ranks", "hosts", "step", "stuck"),
            story=True,
        ),
        "dead link": Event(
            when="No rank takes a step, and two nodes do not reach each other, or (`stuck` is "
            "false) steps are taken again.",
            facts=("hosts", "step", "stuck"),
            story=True,
        ),
        "aside": Event(
            when="A node is set aside because of a dead link, or (`aside` is false) may take part "
            "again.",
            facts=("others", "aside"),
            story=True,
        ),
        "slow storage": Event(
            when="A rank writes its part of checkpoints slower than the others, or all ranks write "
            "slower than before, or (`slow` is false) no longer do.",
            facts=("rank", "host", "step", "slow", "bytes_per_s", "usual_bytes_per_s"),
            story=True,
        ),
        "slow link": Event(
            when="The network from one node to another one is slower than that between others, or "
            "(`slow` is false) no longer is. `host` is the node whose links are all slow, if any.",
            facts=(
                "source",
                "target",
                "host",
                "step",
                "slow",
                "bytes_per_s",
                "usual_bytes_per_s",
                "latency_s",
                "usual_latency_s",
            ),
            story=True,
        ),
        "straggler": Event(
            when="A rank computes longer than the others, which wait for it, or (`slow` is false) "
            "no longer does.",
            facts=("rank", "host", "slow", "factor", "since_step", "lost_s", "cause", "step"),
            story=True,
        ),
        "stacks": Event(when="The stacks of all ranks are written to files: one rank hangs."),
        "forkserver": Event(
            when="The forkserver has ended, or does not answer and is killed, or leaves a module "
            "to the workers, because workers cannot be forked after its import.",
            facts=("left_out",),
        ),
        "unkillable": Event(
            when="A worker cannot be killed, so its node leaves the job.", story=True
        ),
        # How the job ended, written by each agent.
        "time": Event(
            when="The agent ends: what its node's time was used for, in nanoseconds by use.",
            facts=("ns",),
        ),
        "job time": Event(
            when="The job has ended: what the time of all nodes was used for, as far as they have "
            "written it; `missing`: nodes whose last seconds are not in it.",
            facts=("ns", "missing"),
            story=True,
        ),
        "done": Event(when="The agent ends because the job is done."),
        "stopped": Event(when="The agent ends because the job was stopped."),
        "drained": Event(when="The agent ends because its node has left the job."),
        "failed": Event(when="The agent ends because the job has failed."),
    }
)
"""Every event, by its short name."""


def retention(event: str, *, level: int, nodes: int, symptom: bool = False) -> Retention:
    """How long to keep an event of this short name.

    `level`: that of its line. `nodes`: those of the round, all of which may tell it. `symptom`: a
    healthy worker ended because it lost its peers.
    """
    if event in EVENTS and EVENTS[event].story:
        return Retention.STORY
    if level < logging.INFO:  # one line per rank
        return Retention.LOCAL
    matters = level >= logging.WARNING or (event == "exit" and not symptom)
    if nodes <= LARGE_NODES:
        return Retention.STORY if matters else Retention.DETAIL
    return Retention.DETAIL if matters else Retention.LOCAL


class Journal:
    """Writes events to the log and to `path`, appending; safe to share between threads."""

    def __init__(
        self,
        node: str,
        path: Path | None = None,
        *,
        publish: Callable[[str, Retention], None] = lambda line, kept: None,
        unlogged: Collection[str] = (),
    ) -> None:
        """Open the journal of a node, with a file for the events, one JSON object a line.

        Args:
            node: Who writes.
            path: None: no file.
            publish: Called with each event for the store, as JSON; must return at once and raise
                nothing.
            unlogged: Events that are recorded only, because the log has them in other words.
        """
        self._node = node
        self._path = path
        self._publish = publish
        self._unlogged = unlogged
        self._broken = False
        self._writer = Writer("zero-journal")  # a file system that hangs blocks no caller
        self.round = 0
        """Round of an event that names none; the agent keeps it current."""
        self.nodes = 0
        """Number of nodes of the round; the agent keeps it current."""
        self.last = ""
        """The sentence logged last."""

    def line(self, event: str, sentence: str, **facts: Any) -> str:
        """The record of one of `EVENTS`, as of now: a JSON object."""
        record = {"time": time.time(), "node": self._node, "round": self.round, "event": event}
        return line_of({**record, "text": sentence, **facts})

    def tell(
        self,
        event: str,
        sentence: str,
        *,
        level: int = logging.INFO,
        stored: bool = False,
        **facts: Any,
    ) -> None:
        """Log and record one of `EVENTS` with its sentence and its machine-readable facts.

        With `stored`, the store has it already: what it tells of has written it.
        """
        if event not in self._unlogged:
            log.log(level, "%s", sentence)
            self.last = sentence
        line = self.line(event, sentence, **facts)
        if self._path is not None:
            self._writer.put(self._append, f"{line}\n".encode())
        symptom = bool(facts.get("symptom"))
        kept = retention(event, level=level, nodes=self.nodes, symptom=symptom)
        if kept is not Retention.LOCAL and not stored:
            self._publish(line, kept)

    def close(self) -> None:
        """Flush the recorded events to the file; gives up on a file system that hangs."""
        self._writer.flush()

    def _append(self, line: bytes) -> None:
        assert self._path is not None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(line)
                is_full = file.tell() >= FILE_BYTES
            if is_full:  # it becomes the older part, in the place of the one before
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        except OSError as error:  # a full disk loses the line
            if not self._broken:
                log.warning("the journal %s cannot be written: %s", self._path, error)
            self._broken = True
        else:
            self._broken = False
