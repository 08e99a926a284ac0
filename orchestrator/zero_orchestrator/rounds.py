"""The round machine: one pure function says how a job moves on, one transaction moves it.

A job is a sequence of rounds. A round has a fixed, ordered membership, and so fixed ranks. When
membership must change, the round is left (FORMING: its workers stop, each agent says "quiet")
and the next one begins (ACTIVE). There is no leader: every agent reads the same `Snapshot`,
calls `decide` and may try to apply what it says; a transition is one transaction that compares
the revision of the `round` key, so exactly one of them wins and a decision made on an old
snapshot changes nothing. That revision, while a round is ACTIVE, is the *fence* of its workers.

    nothing -> FORMING -> ACTIVE -> DONE
       STOPPED <-'  ^________|  `-> FAILED

Must always hold (tested by exhaustive search in `tests/unit/test_round_model.py`):
I1 one ACTIVE round, n strictly grows, members never change. I2 no commit with an old fence.
I3 ranks are a bijection. I4 size bounds hold. I5 at most one charge per round, and the job
fails iff a failure finds the budget spent. I10 DONE, FAILED and STOPPED are terminal. I11 no
round begins once somebody wants the job to stop, and only such a job is STOPPED.

Source of the ideas: torch elastic's dynamic rendezvous (decide on a state, apply by
compare-and-set), torchft's quorum (a decision comes with its reason), etcd's fencing by
revision; the leader-free form is ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from zero_orchestrator.job_state import NOBODY, Keys, Members, Snapshot, State
from zero_orchestrator.kv import Compare, Delete, Put, Write, absent, unchanged
from zero_orchestrator.ranks import arrange


class Move(StrEnum):
    """What a transition does."""

    OPEN = "open"
    ACTIVATE = "activate"
    YIELD = "yield"
    FORM = "form"
    INTERRUPT = "interrupt"
    FINISH = "finish"
    FAIL = "fail"
    HALT = "halt"


LEGAL: Mapping[Move, tuple[State | None, State]] = {
    Move.OPEN: (None, State.FORMING),
    Move.ACTIVATE: (State.FORMING, State.ACTIVE),
    Move.YIELD: (State.ACTIVE, State.ACTIVE),
    Move.FORM: (State.ACTIVE, State.FORMING),
    Move.INTERRUPT: (State.ACTIVE, State.FORMING),
    Move.FINISH: (State.ACTIVE, State.DONE),
    Move.FAIL: (State.ACTIVE, State.FAILED),
    Move.HALT: (State.FORMING, State.STOPPED),
}
"""Every legal move: from which state, to which. FORM is free, INTERRUPT costs one restart."""


# ---- deciding ----


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How long to wait before acting where acting at once would be hasty. Seconds."""

    settle_s: float = 1.0
    """No node came or went for so long before a round begins below the maximum with newcomers."""
    grow_after_s: float = 2.0
    """No node came or went for so long before a running round is asked to make room."""
    return_within_s: float = 4.0
    """After the store was silent, nodes whose leases lapsed meanwhile have so long to return."""
    symptom_patience_s: float = 6.0
    """A lost peer is expected to show its cause (a failure, a lapsed lease) within so long."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Durations on the observer's own clock, seconds; clocks of two nodes are never compared."""

    nodes_s: float
    """Since it last saw the set of live nodes change."""
    symptom_s: float
    """Since it first saw a symptom in this round; 0 without one."""
    heard_s: float = float("inf")
    """Since the store answered it again after a silence; 0 during one."""


@dataclass(frozen=True)
class Transition:
    """A move to apply to the snapshot it was decided on."""

    move: Move
    cause: str
    members: Members = NOBODY


@dataclass(frozen=True)
class Decision:
    """What should happen now, and the sentence that says why (or what is waited for)."""

    transition: Transition | None
    reason: str


def decide(job: Snapshot, seen: Observed, timing: Timing) -> Decision:
    """The next move of a job, the same for every agent that looks at it.

    Args:
        job: The job at one revision.
        seen: For how long the observer has seen things as they are.
        timing: The job's patience.

    Returns:
        The transition to try, or None, with its reason.
    """
    return _DECIDE[job.state](job, seen, timing)


def _open(job: Snapshot, seen: Observed, timing: Timing) -> Decision:
    if not job.nodes:
        return Decision(None, "no node has registered")
    return _go(Move.OPEN, "the job begins")


def _form(job: Snapshot, seen: Observed, timing: Timing) -> Decision:
    busy = [node.id for node in job.live_members if node.id not in job.quiet]
    if busy:
        return Decision(None, f"waiting for the workers of {', '.join(busy)} to stop")
    if job.stop is not None:
        return Decision(Transition(Move.HALT, job.stop), f"the job ends here: {job.stop}")
    low, high, count = job.spec.min_nodes, job.spec.max_nodes, len(job.eligible)
    if count < low:
        return Decision(None, f"{count} of {low}:{high} nodes are here; waiting for {low - count}")
    wait_s = timing.settle_s - seen.nodes_s
    if job.joiners and count < high and wait_s > 0:
        return Decision(None, f"{count} of {low}:{high} nodes are here; more may be coming")
    by_id = {node.id: node for node in job.eligible}
    order = arrange([m.id for m in job.members.nodes], list(by_id), high)
    members = Members(tuple(by_id[node] for node in order), job.charges)
    return Decision(
        Transition(Move.ACTIVATE, job.cause, members),
        f"round {job.n + 1} begins with {len(order)} of {low}:{high} nodes, "
        f"world size {members.world_size}",
    )


def _watch(job: Snapshot, seen: Observed, timing: Timing) -> Decision:
    """The first rule that has something to say decides."""
    for rule in _WATCH_RULES:
        decision = rule(job, seen, timing)
        if decision is not None:
            return decision
    return Decision(None, f"round {job.n} runs on {len(job.members.nodes)} nodes")


def _all_done(job: Snapshot, seen: Observed, timing: Timing) -> Decision | None:
    if all(member.id in job.done for member in job.members.nodes):
        return _go(Move.FINISH, "every worker has exited with 0")
    return None


def _a_worker_failed(job: Snapshot, seen: Observed, timing: Timing) -> Decision | None:
    causes = [failure for failure in job.failures if not failure.symptom]
    if not causes:
        return None
    if job.yielding is not None and causes[0].revision > job.yield_revision:
        # Workers of other nodes have begun to leave: what breaks now is collateral, and free.
        return _go(Move.FORM, job.yielding)
    return _interrupt(job, causes[0].summary)


def _a_node_is_lost(job: Snapshot, seen: Observed, timing: Timing) -> Decision | None:
    if not job.lost:
        return None
    names = ", ".join(node.id for node in job.lost)
    if seen.heard_s < timing.return_within_s:
        # Leases lapse while nobody can refresh them: that says nothing about the nodes.
        return Decision(None, f"etcd was silent; waiting for node {names} to register again")
    return _interrupt(job, f"lost node {names}")


def _a_symptom_has_no_cause(job: Snapshot, seen: Observed, timing: Timing) -> Decision | None:
    if not job.failures:
        return None
    if seen.symptom_s < timing.symptom_patience_s:
        return Decision(None, f"{job.failures[0].summary}; waiting for the cause")
    return _interrupt(job, f"{job.failures[0].summary}, and no cause appeared")


def _members_leave(job: Snapshot, seen: Observed, timing: Timing) -> Decision | None:
    busy = [m.id for m in job.live_members if m.id not in job.quiet and m.id not in job.done]
    left = [m.id for m in job.members.nodes if m.id in job.quiet]
    if job.yielding is not None:
        if busy:
            return Decision(None, f"{job.yielding}; waiting for {', '.join(busy)} to stop")
        return _go(Move.FORM, job.yielding)
    if left:
        return _go(Move.FORM, f"the workers of {', '.join(left)} left")
    return None


def _the_job_is_to_stop(job: Snapshot, seen: Observed, timing: Timing) -> Decision | None:
    return _go(Move.YIELD, job.stop) if job.stop is not None else None


def _a_member_drains(job: Snapshot, seen: Observed, timing: Timing) -> Decision | None:
    draining = [node.id for node in job.nodes if node.draining and job.has_member(node)]
    if draining:
        return _go(Move.YIELD, f"{', '.join(draining)} is leaving")
    return None


def _room_for_joiners(job: Snapshot, seen: Observed, timing: Timing) -> Decision | None:
    room = job.spec.max_nodes - len(job.members.nodes)
    if not job.joiners:
        return None
    names = ", ".join(node.id for node in job.joiners)
    if room <= 0:
        return Decision(None, f"round {job.n} is full; spare: {names}")
    if seen.nodes_s < timing.grow_after_s:
        return Decision(None, f"{names} will join when the set of nodes is steady")
    return _go(Move.YIELD, f"{names} joins")


def _ended(job: Snapshot, seen: Observed, timing: Timing) -> Decision:
    return Decision(None, f"the job is {job.state}: {job.cause}")


def _go(move: Move, cause: str) -> Decision:
    return Decision(Transition(move, cause), cause)


def _interrupt(job: Snapshot, cause: str) -> Decision:
    """A failure: one restart of the budget, or the end of the job when none is left."""
    if job.stop is not None:
        return _go(Move.FORM, f"{cause}; nothing restarts, {job.stop}")
    budget = job.spec.max_restarts
    if job.charges < budget:
        return Decision(
            Transition(Move.INTERRUPT, cause), f"{cause}; restart {job.charges + 1} of {budget}"
        )
    spent = "no restarts are allowed" if budget == 0 else f"all {budget} restarts are spent"
    return _go(Move.FAIL, f"{cause}; {spent} (--max-restarts)")


_Rule = Callable[[Snapshot, Observed, Timing], Decision | None]
_WATCH_RULES: Sequence[_Rule] = (
    _all_done,
    _a_worker_failed,
    _a_node_is_lost,
    _a_symptom_has_no_cause,
    _members_leave,
    _the_job_is_to_stop,
    _a_member_drains,
    _room_for_joiners,
)
_DECIDE: Mapping[State | None, Callable[[Snapshot, Observed, Timing], Decision]] = {
    None: _open,
    State.FORMING: _form,
    State.ACTIVE: _watch,
    State.DONE: _ended,
    State.FAILED: _ended,
    State.STOPPED: _ended,
}


# ---- applying ----


def transaction(
    keys: Keys, job: Snapshot, transition: Transition
) -> tuple[list[Compare], list[Write]]:
    """The one transaction that carries out a transition, and only on this very snapshot.

    Raises:
        ValueError: The move is not legal in the snapshot's state; nothing is to be written.
    """
    source, target = LEGAL[transition.move]
    if job.state is not source:
        raise ValueError(f"{transition.move} in state {job.state} of round {job.n}")
    compares = [unchanged(keys.round, job.fence)]
    if transition.move is Move.YIELD:
        # The round goes on, and so does its fence: the workers still have a step to commit.
        yielded = keys.of_round(job.n, "yield")
        return [*compares, absent(yielded)], [Put(yielded, json.dumps(transition.cause))]
    n = job.n + 1 if transition.move is Move.ACTIVATE else job.n
    record = {"n": n, "state": target, "cause": transition.cause}
    writes: list[Write] = [Put(keys.round, json.dumps(record))]
    if transition.move in {Move.INTERRUPT, Move.FAIL}:
        writes.append(Put(keys.charged(job.n), json.dumps(transition.cause)))
    if transition.move is Move.ACTIVATE:
        members = keys.of_round(n, "members")
        compares += [absent(members), absent(keys.stop)]
        writes.append(Put(members, transition.members.to_json()))
        # The round before the last is history; its failures are in the journal.
        writes.append(Delete(keys.of_round(n - 2, ""), prefix=True))
    return compares, writes
