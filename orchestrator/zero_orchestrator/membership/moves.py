"""The state transitions of a job, and the one transaction (compare-and-set) for each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from zero_orchestrator.membership.dead_links import SetAside
from zero_orchestrator.membership.failures import Charge, Exclusion
from zero_orchestrator.membership.job_state import NOBODY, Head, Members, Snapshot, State
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.store.kv import NO_LEASE, Compare, Delete, Put, Write, absent, unchanged


class Move(StrEnum):
    """The kind of a transition."""

    OPEN = "open"
    ACTIVATE = "activate"
    YIELD = "yield"
    FORM = "form"
    INTERRUPT = "interrupt"
    FINISH = "finish"
    FAIL = "fail"
    GIVE_UP = "give up"
    HALT = "halt"


LEGAL: Mapping[Move, tuple[State | None, State]] = {
    Move.OPEN: (None, State.FORMING),
    Move.ACTIVATE: (State.FORMING, State.ACTIVE),
    Move.YIELD: (State.ACTIVE, State.ACTIVE),
    Move.FORM: (State.ACTIVE, State.FORMING),
    Move.INTERRUPT: (State.ACTIVE, State.FORMING),
    Move.FINISH: (State.ACTIVE, State.DONE),
    Move.FAIL: (State.ACTIVE, State.FAILED),
    Move.GIVE_UP: (State.ACTIVE, State.FAILED),
    Move.HALT: (State.FORMING, State.STOPPED),
}
"""Every legal move: from which state, to which. FORM is free, INTERRUPT costs one restart."""


@dataclass(frozen=True)
class Transition:
    """A move to apply to the snapshot it was decided on."""

    move: Move
    cause: str
    members: Members = NOBODY
    charge: Charge | None = None
    exclusion: Exclusion | None = None
    """Exclusion of the host that is charged; its key needs a lease of the same duration."""
    aside: tuple[SetAside, ...] = ()
    """Nodes that are set aside."""


class Wait(StrEnum):
    """What a job waits for that may take for ever, unless somebody helps."""

    WORKERS = "workers"
    """Workers that are to stop."""
    NODES = "nodes"
    """More nodes."""
    HEALTH = "health"
    """More nodes, and there are unhealthy ones."""
    LINKS = "links"
    """Nodes that are set aside: to reach each other again."""
    IMPORTS = "imports"
    """The imports of this node's workers, before it registers."""


@dataclass(frozen=True)
class Decision:
    """The transition to make now, or None, and the reason (or what the job waits for)."""

    transition: Transition | None
    reason: str
    waits_for: Wait | None = None
    """The same for programs; None: for nothing, or for something that ends soon."""


def go(move: Move, cause: str, **cost: Any) -> Decision:
    """A decision whose reason is its cause; `cost`: further fields of `Transition`."""
    return Decision(Transition(move, cause, **cost), cause)


_OF_A_ROUND = ("quiet", "done", "fail", "symptom", "links")
"""The kinds of reports that there cannot be before their round begins."""


def transaction(
    keys: Keys,
    job: Snapshot,
    transition: Transition,
    lease: int = NO_LEASE,
    *,
    at_s: float = 0.0,
    took_s: float = 0.0,
) -> tuple[list[Compare], list[Write]]:
    """The transaction that carries out a transition, if the snapshot still is current.

    Args:
        keys: Of the job.
        job: What the transition was decided on.
        transition: What to carry out.
        lease: Lease of the exclusion, if there is one.
        at_s: The writer's wall clock, for people and for `zero-ctl gc`; no decision depends on it.
        took_s: Seconds since the workers of the round before were asked to leave, if the next one
            begins.

    Raises:
        ValueError: The move is not legal in the snapshot's state.
    """
    source, target = LEGAL[transition.move]
    if job.state is not source:
        raise ValueError(f"{transition.move} in state {job.state} of round {job.n}")
    # Of several agents exactly one makes a move, and none makes it on an outdated snapshot.
    compares = [unchanged(keys.round, job.fence)]
    if transition.move is Move.YIELD:
        # The round and its fence continue: the workers still have a step to commit.
        yielded = keys.of_round(job.n, "yield")
        return [*compares, absent(yielded)], [Put(yielded, json.dumps(transition.cause))]
    n = job.n + 1 if transition.move is Move.ACTIVATE else job.n
    failed = next((f.node for f in job.failures if not f.symptom), "")
    head = Head(
        n=n,
        state=target,
        cause=transition.cause,
        by=transition.move,
        at=at_s or None,
        # All agents read this one report, and not those of all nodes.
        failed=failed if source is State.ACTIVE else "",
        took_s=round(took_s, 3) if transition.move is Move.ACTIVATE else 0.0,
    )
    writes: list[Write] = [Put(keys.round, head.to_json())]
    if transition.charge is not None:
        writes.append(Put(keys.charged(job.n), transition.charge.to_json()))
        # A checkpoint published since the snapshot is progress, and may refill the budget.
        compares.append(unchanged(keys.latest, job.committed_revision))
    if (exclusion := transition.exclusion) is not None:
        writes.append(Put(keys.excluded(exclusion.host), exclusion.to_json(), lease))
    writes += [Put(keys.aside(one.node), one.to_json()) for one in transition.aside]
    if transition.move is Move.ACTIVATE:
        members = keys.of_round(n, "members")
        compares.append(absent(keys.stop))  # I11: the snapshot may be older than the request
        writes.append(Put(members, transition.members.to_json()))
        # The round before the last is history; its failures are in the journal.
        old = (keys.of_round(n - 2, ""), keys.report(n - 2, ""))
        # A round of this number may have been before etcd was restored from an older copy.
        lost = [keys.report(n, kind, "") for kind in _OF_A_ROUND]
        writes += [Delete(prefix, prefix=True) for prefix in (*old, *lost)]
    return compares, writes
