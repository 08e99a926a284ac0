"""The records in a job's keys, and the `Snapshot` of them that every decision depends on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import Any, Self

from zero_contract import worker
from zero_contract.decoding import encode
from zero_contract.signing import Purpose, Secret, derive
from zero_orchestrator.errors import SpecMismatch
from zero_orchestrator.membership.dead_links import LinkReport, Pair, SetAside
from zero_orchestrator.membership.failures import Charge, Exclusion, in_force
from zero_orchestrator.membership.records import PROTOCOL, Record, pack, read, unpack
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
class Head(Record):
    """The current round of a job: the value of its `round` key."""

    n: int
    state: State
    cause: str
    by: str = ""
    """The move that led to the state."""
    at: float | None = None
    """When that was, by the writer's wall clock: for people; no decision depends on it."""
    failed: str = ""
    """As in `Snapshot`."""
    took_s: float = 0.0
    """As in `Snapshot`."""


@dataclass(frozen=True, kw_only=True)
class Published(Record):
    """The newest checkpoint of a job."""

    step: int
    tag: str = ""
    digest: str = ""
    samples: int = 0
    time: float = 0.0
    """When it was published, by the writer's wall clock: for people."""
    root: str = ""
    """The directory or URL that the job resumes from; empty: it has no checkpoint yet."""


@dataclass(frozen=True, kw_only=True)
class Node(Record):
    """An agent that is alive, as it describes itself."""

    id: str
    incarnation: str
    """Differs for each agent process: tells a restarted agent from its predecessor."""
    address: str
    slots: int
    """Workers on this node."""
    draining: bool = False
    """The node is leaving: it keeps its round until the next step boundary, and joins no other."""
    ring: str = ""
    """Address of its liveness ring, `host:port`."""
    role: str = "default"
    """Role of its workers, as torchrun's --role."""
    host: str = ""
    """Name of its machine, which stays when the agent is restarted; empty: the id."""
    unhealthy: str = ""
    """Why it cannot take part in a round now, by its own judgement."""
    protocol: int = PROTOCOL
    """The version of the protocol that it speaks."""
    process: str = ""
    """Identifies its process for other agents of the same machine."""
    lease_ttl_s: int = 3
    """The time to live of the lease that it is registered under."""
    evicted: int = 0
    """How often others have evicted this agent process although it was alive."""
    topology: str = ""
    """Where it is in the network, from the widest part on: `block-1.rack-7`; empty: unknown."""
    stays: bool = False
    """Its workers have said that they may stay in their processes from round to round."""
    starting: bool = False
    """Its workers warm up: rounds that have enough other nodes begin without it."""

    @property
    def agent(self) -> tuple[str, str]:
        """Its id and incarnation: this agent process, and no other one that has the id."""
        return self.id, self.incarnation

    @property
    def machine(self) -> str:
        """The host that an exclusion names."""
        return self.host or self.id


_LEASE_ENDS = 1.5
"""Of the time to live: etcd ends a lease up to half a second late, and a new leader renews all."""


@dataclass(frozen=True)
class Members(Record):
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
        return {node.agent: index for index, node in enumerate(self.nodes)}

    def index(self, node: Node) -> int | None:
        """The place of this very agent process among the nodes, or None."""
        return self._places.get(node.agent)

    @property
    def leases_end_s(self) -> float:
        """Seconds without a refresh, after which the lease of each of them has ended."""
        return _LEASE_ENDS * max((node.lease_ttl_s for node in self.nodes), default=0.0)

    def first_rank(self, index: int) -> int:
        """The rank of the first worker of the node at `index`; ranks of a node are contiguous."""
        return sum(node.slots for node in self.nodes[:index])

    def node_of(self, rank: int) -> Node:
        """The node of a worker, by the worker's rank."""
        ends = accumulate(node.slots for node in self.nodes)
        return next(node for node, end in zip(self.nodes, ends, strict=True) if rank < end)

    def to_json(self) -> str:
        """The value of its key: one row for each node, since every agent is sent all of them."""
        fields = [field.name for field in dataclasses.fields(Node)]
        rows = [[getattr(node, name) for name in fields] for node in self.nodes]
        record = {"restarts": self.restarts, "fields": fields, "nodes": rows}
        text = json.dumps(record, separators=(",", ":"))
        return text if len(text) < _LONG else encode(_Rows(zlib=pack(text)))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The inverse of `to_json`; raises as `read`."""
        record = read(_Rows, text)
        try:
            if record.zlib:
                return cls.from_json(unpack(record.zlib))
            rows = [dict(zip(record.fields, row, strict=True)) for row in record.nodes]
        except ValueError as error:
            raise SpecMismatch(f"the members of a round in etcd are damaged: {error}") from error
        return cls(tuple(read(Node, row) for row in rows), record.restarts)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """The value of the key of a membership."""

    restarts: int = 0
    fields: tuple[str, ...] = ()
    nodes: tuple[tuple[Any, ...], ...] = ()
    zlib: str = ""
    """The packed value, in the place of all others."""


NOBODY = Members()


def with_addresses(members: Members, nodes: Collection[str]) -> list[str]:
    """Some of the nodes of a round, each with its address."""
    return [f"{node.id} ({node.address})" for node in members.nodes if node.id in nodes]


def link_in_words(members: Members, ends: Collection[str], why: str) -> str:
    """A dead link between two of the nodes of a round, and what one of them has found."""
    return f"the link between {' and '.join(with_addresses(members, ends))} is dead: {why}"


_LONG = 8192
"""Characters above which a membership is compressed: every member receives it."""


@dataclass(frozen=True, kw_only=True)
class Failure(Record):
    """The report of one node about its failed workers."""

    node: str
    symptom: bool
    """The workers were healthy and lost their peers: the cause is on another node."""
    summary: str
    rank: int = -1
    traceback: str = ""
    hang: bool = False
    """The workers hung, taking no step: the others dump their stacks before they are killed."""
    step: int | None = None
    """The last step that they finished, 0 before the first; None: they report no steps."""
    host: str = ""
    """Host name of the machine, as the machine knows itself."""
    local_rank: int | None = None
    pid: int | None = None
    status: int | None = None
    """Exit code, or the negative number of the signal that ended the worker; None: it runs."""
    error_file: str = ""
    """Path on that host; empty: the worker left no error file."""
    permanent: bool = False
    """A restart would meet the same error: the config or the arguments are wrong."""
    revision: int = 0
    """Store revision of the report: orders failures across nodes without comparing clocks."""


@dataclass(frozen=True)
class DrainOrder(Record):
    """A user's request that one agent process leaves the job."""

    node: str
    incarnation: str
    by: str
    """The user who asked."""


@dataclass(frozen=True)
class Snapshot:
    """A job as read at one revision of the store; decisions depend on nothing else of it."""

    spec: JobSpec
    n: int = 0
    state: State | None = None
    cause: str = ""
    fence: int = 0
    """mod_revision of the `round` key; 0 when there is none."""
    store: str = ""
    """The id of the etcd cluster in which the fence counts, hex; empty: there is one alone."""
    nodes: tuple[Node, ...] = ()
    """Live agents in order of arrival."""
    members: Members = NOBODY
    """The nodes of round n."""
    master: str | None = None
    yielding: str | None = None
    yield_revision: int = 0
    quiet: frozenset[str] = frozenset()
    done: frozenset[str] = frozenset()
    leaving: frozenset[str] = frozenset()
    """Nodes asked to leave in round n, as at a preemption: their end is no loss, even if early."""
    failures: tuple[Failure, ...] = ()
    """Reports of round n, first one first."""
    links: tuple[LinkReport, ...] = ()
    """Reports of the nodes of round n that have looked at their links to the other members."""
    charged: tuple[Charge, ...] = ()
    """Charges to the restart budget, in order of rounds."""
    took_s: float = 0.0
    """Seconds from the request to leave the round before to this one; 0: there was none."""
    by: str = ""
    """The move that led to the state."""
    at_s: float | None = None
    """When that was, by the wall clock of the agent that made it; no decision depends on it."""
    failed: str = ""
    """The node whose workers failed first in round n, once the round is over; empty: none did."""
    committed: int = 0
    """The step of the newest published checkpoint; 0 without one."""
    committed_revision: int = 0
    """mod_revision of its key; 0 when there is none."""
    committed_root: str = ""
    """See `Published.root`."""
    stop: str | None = None
    """A user's request that the job ends: who asked, and why."""
    drains: tuple[DrainOrder, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()
    aside: tuple[SetAside, ...] = ()

    @property
    def charges(self) -> int:
        """Failures of the job so far."""
        return len(self.charged)

    @cached_property
    def spent(self) -> int:
        """Charges that still count towards the budget."""
        return in_force(self.charged, self.committed, self.spec.refill_after_steps)

    @cached_property
    def reached(self) -> int | None:
        """The last step known to be finished by any worker; None: no worker reported one."""
        steps = [charge.reached for charge in self.charged]
        steps += [failure.step for failure in self.failures]
        # What is committed has been reached, also where workers report no steps.
        known = [step for step in steps if step is not None]
        return max(*known, self.committed) if known else self.committed or None

    @cached_property
    def alive(self) -> frozenset[tuple[str, str]]:
        """The live agents, as `Node.agent`."""
        return frozenset(node.agent for node in self.nodes)

    @cached_property
    def live_members(self) -> tuple[Node, ...]:
        """Members of round n whose agents are alive."""
        return tuple(m for m in self.members.nodes if m.agent in self.alive)

    @cached_property
    def unfinished(self) -> tuple[Node, ...]:
        """Live members of round n, as registered now, whose workers have not all exited with 0."""
        return tuple(n for n in self.nodes if self.has_member(n) and n.id not in self.done)

    @cached_property
    def lost(self) -> tuple[Node, ...]:
        """Members of round n whose agents vanished while their workers ran."""
        gone = (m for m in self.members.nodes if m.agent not in self.alive)
        return tuple(m for m in gone if m.id not in self.at_rest)

    @cached_property
    def released(self) -> frozenset[str]:
        """Nodes whose workers lost peers that had been asked to leave: no failure."""
        if self.yielding is None:
            return frozenset()
        # A peer that was lost before the request was lost for another reason.
        after = (f for f in self.failures if f.symptom and f.revision > self.yield_revision)
        return frozenset(failure.node for failure in after)

    @cached_property
    def at_rest(self) -> frozenset[str]:
        """Nodes whose workers of round n have ended without a failure of their own."""
        return self.quiet | self.done | self.released

    @cached_property
    def dead_links(self) -> Mapping[Pair, str]:
        """Links between live members that one of them has found dead, and what it has found."""
        # A link to a node that is gone is explained by that.
        live = {member.id for member in self.live_members}
        return {
            frozenset((report.node, link.to)): link.why
            for report in self.links
            for link in report.dead
            if {report.node, link.to} <= live
        }

    @cached_property
    def looked(self) -> frozenset[str]:
        """Nodes that have looked at their links."""
        return frozenset(report.node for report in self.links)

    @cached_property
    def eligible(self) -> tuple[Node, ...]:
        """Live agents that may take part in the next round."""
        aside = {one.node for one in self.aside}
        nodes = [node for node in self.nodes if node.id not in aside]
        fit = [node for node in nodes if not node.draining and not node.unhealthy]
        free = [node for node in fit if self.exclusion(node) is None]
        needed = [n for n in fit if (e := self.exclusion(n)) is None or not e.by_user]
        # For the minimum alone: no job waits until workers have warmed up, and a host that keeps
        # failing is better than none.
        choices = ([node for node in free if not node.starting], free, needed)
        enough = (c for c in choices if self.spec.is_enough(len(c)))
        return tuple(next(enough, needed))

    @property
    def lacks_nodes(self) -> bool:
        """Whether no round can begin until more nodes are here."""
        return not self.spec.is_enough(len(self.eligible))

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
        return frozenset(node.agent for node in self.eligible)

    def barred(self, node: Node) -> Exclusion | None:
        """The exclusion that keeps this node out of rounds; None: not excluded, or needed."""
        exclusion = self.exclusion(node)
        return None if exclusion is None or node.agent in self._eligible else exclusion

    def node(self, node: str) -> Node | None:
        """The live agent of this id, or None."""
        return next((alive for alive in self.nodes if alive.id == node), None)

    def has_member(self, node: Node) -> bool:
        """Whether this agent process is a member of round n."""
        return self.members.index(node) is not None

    def warming_up(self, node: Node) -> Snapshot:
        """The round 0 of an agent whose workers warm up: its ranks are those of a last member."""
        members = Members((*self.members.nodes, node), self.charges)
        return dataclasses.replace(self, n=0, fence=0, master=None, members=members)

    def drain_order(self, node: Node) -> DrainOrder | None:
        """The request that this agent process leaves, or None."""
        return next((d for d in self.drains if (d.node, d.incarnation) == node.agent), None)


def round_env(job: Snapshot, name: str, node: Node, secret: Secret, socket: str) -> dict[str, str]:
    """The variables by which the workers of a round know it, and the socket of their launcher."""
    values: dict[str, object] = {
        worker.ENV_JOB: name,
        worker.ENV_NODE: node.id,
        worker.ENV_RUN: derive(secret, Purpose.RUN)[:16],
        worker.ENV_ROUND: job.n,
        worker.ENV_FENCE: job.fence,
        worker.ENV_STORE: job.store,
        worker.ENV_COMMITTED: job.committed,
        worker.ENV_COMMITTED_ROOT: job.committed_root,
        worker.ENV_SOCKET: socket,
        worker.ENV_VOTE_KEY: derive(secret, Purpose.ROUND, str(job.n)),
    }
    return {key: str(value) for key, value in values.items()}
