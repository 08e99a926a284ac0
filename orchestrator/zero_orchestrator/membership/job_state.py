"""What a job's keys mean: the records in them, and the snapshot every decision looks at.

`rounds.py` decides on a `Snapshot` of them, which `parse.py` makes; `rendezvous.py` writes them.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from zero_orchestrator.membership.failures import Charge, Exclusion, in_force
from zero_orchestrator.membership.records import FIRST_PROTOCOL
from zero_orchestrator.membership.spec import JobSpec


class State(StrEnum):
    """The state of a job's current round."""

    FORMING = "FORMING"
    ACTIVE = "ACTIVE"
    DONE = "DONE"
    FAILED = "FAILED"
    STOPPED = "STOPPED"


ENDED = frozenset({State.DONE, State.FAILED, State.STOPPED})
"""The states that no job leaves."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """An agent that is alive, as it describes itself."""

    id: str
    incarnation: str
    """Differs for each agent process, so that a restarted one is not taken for the old."""
    address: str
    slots: int
    """Workers on this node."""
    draining: bool = False
    """It wants to leave: it keeps its round until the next step boundary and joins no other."""
    ring: str = ""
    """Where its liveness ring listens, `host:port`."""
    role: str = "default"
    """What its workers are called."""
    host: str = ""
    """Where it is, by a name that stays when the agent is started again; empty: the id."""
    unhealthy: str = ""
    """Why it cannot take part in a round now, by its own judgement."""
    protocol: int = FIRST_PROTOCOL
    """The version of the protocol that it speaks."""
    process: str = ""
    """Which process it is, for other agents of the same machine."""
    lease_ttl_s: int = 3
    """The time to live of the lease that it is registered under."""
    evicted: int = 0
    """How often others have removed this very process, and it was alive."""

    @property
    def machine(self) -> str:
        """What an exclusion of it is about."""
        return self.host or self.id

    def to_json(self) -> str:
        """The value of its key."""
        return json.dumps(dataclasses.asdict(self))


@dataclass(frozen=True)
class Members:
    """The immutable membership of a round, in rank order."""

    nodes: tuple[Node, ...] = ()
    restarts: int = 0
    """Failures charged to the job before this round."""

    @property
    def world_size(self) -> int:
        """Workers of all nodes."""
        return sum(node.slots for node in self.nodes)

    @cached_property
    def _places(self) -> dict[tuple[str, str], int]:
        return {(node.id, node.incarnation): index for index, node in enumerate(self.nodes)}

    def index(self, node: Node) -> int | None:
        """The place of this very agent process among the nodes, or None."""
        return self._places.get((node.id, node.incarnation))

    def first_rank(self, index: int) -> int:
        """The rank of the first worker of the node at `index`; ranks of a node are contiguous."""
        return sum(node.slots for node in self.nodes[:index])

    def to_json(self) -> str:
        """The value of its key: one row for each node, since every agent is sent all of them."""
        fields = [field.name for field in dataclasses.fields(Node)]
        rows = [[getattr(node, name) for name in fields] for node in self.nodes]
        record = {"restarts": self.restarts, "fields": fields, "nodes": rows}
        text = json.dumps(record, separators=(",", ":"))
        return text if len(text) < _LONG else json.dumps({"zlib": _packed(text)})


NOBODY = Members()

_LONG = 8192
"""A longer membership is compressed: it is sent to as many agents as it names."""


def _packed(text: str) -> str:
    return base64.b85encode(zlib.compress(text.encode())).decode()


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What one node reports of its failed workers."""

    node: str
    symptom: bool
    """The workers were healthy and lost their peers: the cause is elsewhere."""
    summary: str
    rank: int = -1
    traceback: str = ""
    hang: bool = False
    """They ran and took no step: the others write down where they are before they are killed."""
    step: int | None = None
    """The last step that they have finished, 0 before the first; None: they do not say."""
    host: str = ""
    """Where it was, by the name that the machine has for itself."""
    local_rank: int | None = None
    pid: int | None = None
    status: int | None = None
    """Exit code, or the negative number of the signal that ended the worker; None: it did not."""
    error_file: str = ""
    """On that host; empty: the worker left none."""
    revision: int = 0
    """Store revision of the report: orders failures across nodes without comparing clocks."""

    def to_json(self) -> str:
        """The value of its key."""
        return json.dumps(dataclasses.asdict(self))


@dataclass(frozen=True)
class DrainOrder:
    """Somebody's wish that one agent process leaves the job."""

    node: str
    incarnation: str
    by: str
    """Who wants it."""

    def to_json(self) -> str:
        """The value of its key."""
        return json.dumps(dataclasses.asdict(self))


@dataclass(frozen=True)
class Snapshot:
    """A job as read at one revision of the store; every decision looks at nothing else."""

    spec: JobSpec
    n: int = 0
    state: State | None = None
    cause: str = ""
    fence: int = 0
    """mod_revision of the `round` key; 0 when there is none."""
    nodes: tuple[Node, ...] = ()
    """Live agents in order of arrival."""
    members: Members = NOBODY
    """Of round n."""
    master: str | None = None
    yielding: str | None = None
    yield_revision: int = 0
    quiet: frozenset[str] = frozenset()
    done: frozenset[str] = frozenset()
    leaving: frozenset[str] = frozenset()
    """Nodes that were told to leave in round n: their end is no loss, even if it comes early."""
    failures: tuple[Failure, ...] = ()
    """Reports of round n, first one first."""
    charged: tuple[Charge, ...] = ()
    """To the restart budget, in order of rounds."""
    took_s: float = 0.0
    """Since the workers of the round before were asked to leave; 0 if they were not."""
    by: str = ""
    """The move that led to the state."""
    committed: int = 0
    """The step of the newest published checkpoint; 0 without one."""
    committed_revision: int = 0
    """mod_revision of its key; 0 when there is none."""
    stop: str | None = None
    """Somebody wants the job to end: who, and why."""
    drains: tuple[DrainOrder, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()

    @property
    def charges(self) -> int:
        """Failures of the job so far."""
        return len(self.charged)

    @cached_property
    def spent(self) -> int:
        """Those of them that count."""
        return in_force(self.charged, self.committed, self.spec.refill_after_steps)

    @cached_property
    def reached(self) -> int | None:
        """The last step that any worker is known to have finished; None if nobody says."""
        told = [charge.reached for charge in self.charged]
        told += [failure.step for failure in self.failures]
        known = [step for step in told if step is not None]
        return max(*known, self.committed) if known else self.committed or None

    @cached_property
    def alive(self) -> frozenset[tuple[str, str]]:
        """(id, incarnation) of the live agents."""
        return frozenset((node.id, node.incarnation) for node in self.nodes)

    @cached_property
    def live_members(self) -> tuple[Node, ...]:
        """Members of round n whose agents are alive."""
        return tuple(m for m in self.members.nodes if (m.id, m.incarnation) in self.alive)

    @cached_property
    def lost(self) -> tuple[Node, ...]:
        """Members of round n whose agents vanished with work in hand."""
        gone = (m for m in self.members.nodes if (m.id, m.incarnation) not in self.alive)
        return tuple(m for m in gone if m.id not in self.at_rest)

    @cached_property
    def released(self) -> frozenset[str]:
        """Nodes whose workers lost their peers when those had been asked to leave: no fault."""
        if self.yielding is None:
            return frozenset()
        after = (f for f in self.failures if f.symptom and f.revision > self.yield_revision)
        return frozenset(failure.node for failure in after)

    @cached_property
    def at_rest(self) -> frozenset[str]:
        """Nodes whose workers of round n have ended, and not as a failure of theirs."""
        return self.quiet | self.done | self.released

    @cached_property
    def eligible(self) -> tuple[Node, ...]:
        """Live agents that may take part in the next round.

        Where the minimum cannot be met otherwise, those that only the job itself has excluded may:
        a host that keeps failing is better than none.
        """
        fit = [node for node in self.nodes if not node.draining and not node.unhealthy]
        chosen = [node for node in fit if self.exclusion(node) is None]
        if self.spec.usable(len(chosen)) < self.spec.min_nodes:
            chosen = [n for n in fit if (e := self.exclusion(n)) is None or not e.by_user]
        return tuple(chosen)

    @cached_property
    def joiners(self) -> tuple[Node, ...]:
        """Eligible agents that are no members of round n."""
        return tuple(node for node in self.eligible if self.members.index(node) is None)

    @cached_property
    def _excluded(self) -> Mapping[str, Exclusion]:
        return {exclusion.host: exclusion for exclusion in self.exclusions}

    def exclusion(self, node: Node) -> Exclusion | None:
        """The exclusion of this node's host, or None."""
        return self._excluded.get(node.machine)

    @cached_property
    def _eligible(self) -> frozenset[tuple[str, str]]:
        return frozenset((node.id, node.incarnation) for node in self.eligible)

    def barred(self, node: Node) -> Exclusion | None:
        """Why no round begins with this node, if it is excluded and can be done without."""
        exclusion = self.exclusion(node)
        if exclusion is None or (node.id, node.incarnation) in self._eligible:
            return None
        return exclusion

    def node(self, node: str) -> Node | None:
        """The live agent of this id, or None."""
        return next((alive for alive in self.nodes if alive.id == node), None)

    def has_member(self, node: Node) -> bool:
        """Whether this agent process is a member of round n."""
        return self.members.index(node) is not None

    def drain_order(self, node: Node) -> DrainOrder | None:
        """The wish that this very agent process leaves, or None."""
        who = (node.id, node.incarnation)
        return next((d for d in self.drains if (d.node, d.incarnation) == who), None)
