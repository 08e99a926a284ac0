"""The round machine: one pure function decides a job's next move, one transaction makes it.

A job is a sequence of rounds. A round has a fixed, ordered membership, and so fixed ranks. When
membership must change (the lease of a node has expired, a node joins or drains, a worker failed),
the round is left (FORMING: its workers stop, each agent reports "quiet") and the next one begins
(ACTIVE). There is no leader: every agent reads the same `Snapshot`, calls `decide` and may try to
apply the decision, in one transaction that compares the revision of the `round` key. That revision,
while a round is ACTIVE, is the *fence* of its workers.

    nothing -> FORMING -> ACTIVE -> DONE
       STOPPED <-'  ^________|  `-> FAILED

The invariants I1 to I12 of ARCHITECTURE.md hold, tested by exhaustive search (`tests/model`).

Source of the ideas: torch elastic's dynamic rendezvous (decide on a state, apply by
compare-and-set), torchft's quorum (a decision comes with its reason), etcd's fencing by
revision; the leader-free form is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from zero_orchestrator.membership.dead_links import SetAside, unreached, who_goes
from zero_orchestrator.membership.failures import Charge, Exclusion, due, fruitless, next_refill
from zero_orchestrator.membership.job_state import (
    Members,
    Snapshot,
    State,
    link_in_words,
    with_addresses,
)
from zero_orchestrator.membership.moves import (
    LEGAL,
    Decision,
    Move,
    Transition,
    Wait,
    go,
    transaction,
)
from zero_orchestrator.membership.ranks import arrange, path_of

__all__ = [
    "LEGAL",
    "Decision",
    "Move",
    "Observation",
    "Timing",
    "Transition",
    "Wait",
    "decide",
    "transaction",
]


_T = TypeVar("_T")
_NAMED = 8
"""Most nodes that a message names; a large job has thousands."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The waits before a move that would be hasty if it were made at once. Seconds."""

    settle_s: float = 1.0
    """No node came or went for so long before a round begins below the maximum with newcomers."""
    grow_after_s: float = 2.0
    """No node came or went for so long before a running round is asked to make room."""
    grow_every_s: float | None = None
    """A round runs for so long before it is asked to; None: as long as a re-forming is worth."""
    longest_growth_wait_s: float = 600.0
    """No node that could take part waits for longer because of what a re-forming costs."""
    return_within_s: float = 7.0
    """After the store was silent, nodes whose leases lapsed meanwhile have so long to return. A
    call to the store that has begun in the silence holds their loops up, for 5 s at most."""
    symptom_patience_s: float = 6.0
    """The cause of a lost peer (a failure, a lapsed lease) is expected within this time."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Durations on the observer's own clock, seconds; clocks of two nodes are never compared."""

    nodes_s: float
    """Since it last saw the set of live nodes change."""
    symptom_s: float
    """Since it first saw a symptom in this round; 0 without one."""
    links_s: float = float("inf")
    """Since it first saw a dead link in this round; 0 without one."""
    heard_s: float = float("inf")
    """Since the store answered it again after a silence; 0 during one."""
    ended: frozenset[tuple[str, str]] = frozenset()
    """Node id and incarnation of agents whose processes have ended, as it knows."""
    round_s: float = float("inf")
    """Since it first saw this round run."""
    reform_s: float = 0.0
    """From when workers were asked to leave to the first step after; 0: it does not know."""


def decide(job: Snapshot, seen: Observation, timing: Timing) -> Decision:
    """The next move of a job at one revision, or None, with its reason; all agents decide alike.

    `seen`: for how long the observer has seen things as they are.
    """
    return _DECIDE[job.state](job, seen, timing)


def _open(job: Snapshot, seen: Observation, timing: Timing) -> Decision:
    if not job.nodes:
        return Decision(None, "no node has registered")
    return go(Move.OPEN, "the job begins")


def _form(job: Snapshot, seen: Observation, timing: Timing) -> Decision:
    # A worker that still runs has its device, which the next round needs.
    busy = [node.id for node in job.live_members if node.id not in job.quiet]
    if busy:
        text = f"waiting for the workers of {_some(busy)} to stop"
        return Decision(None, text, Wait.WORKERS)
    # Not before they are gone: agents kill what runs when the job has ended, also in a last save.
    if job.stop is not None:
        return Decision(Transition(Move.HALT, job.stop), f"the job ends here: {job.stop}")
    low, high, count = job.spec.min_nodes, job.spec.max_nodes, len(job.eligible)
    if job.lacks_nodes:
        text = f"{_here(job)}; waiting for {job.spec.fewest - count}"
        unhealthy = any(node.unhealthy for node in job.nodes)
        waits_for = Wait.HEALTH if unhealthy else Wait.NODES
        waits_for = Wait.LINKS if _aside(job) else waits_for
        return Decision(None, f"{text}{_absent(job)}", waits_for)
    # Survivors alone begin at once: nobody else is known to be on the way.
    if job.joiners and count < high and seen.nodes_s < timing.settle_s:
        return Decision(None, f"{_here(job)}; more may be coming")
    by_id = {node.id: node for node in job.eligible}
    former = [member.id for member in job.members.nodes]
    # Also of nodes that left: a newcomer takes the place of the one that was nearest to it.
    paths = {node.id: path_of(node.topology) for node in (*job.members.nodes, *job.eligible)}
    order = arrange(former, list(by_id), job.spec.usable(count), paths)
    members = Members(tuple(by_id[node] for node in order), job.charges)
    return Decision(
        Transition(Move.ACTIVATE, job.cause, members),
        f"round {job.n + 1} begins with {len(order)} of {low}:{high} nodes, "
        f"world size {members.world_size}",
    )


def _some(found: Sequence[_T], separator: str = ", ", words: Callable[[_T], str] = str) -> str:
    """The first of them in words, and how many more there are."""
    more = len(found) - _NAMED
    return separator.join(map(words, found[:_NAMED])) + (f" and {more} more" if more > 0 else "")


def _here(job: Snapshot) -> str:
    return f"{len(job.eligible)} of {job.spec.min_nodes}:{job.spec.max_nodes} nodes are here"


def _absent(job: Snapshot) -> str:
    """The nodes that do not take part, and why: gone, about to go, or not allowed to."""
    here, machines = {node.id for node in job.nodes}, {node.machine for node in job.nodes}
    gone = [node.id for node in job.members.nodes if node.id not in here]
    leaving = [node.id for node in job.nodes if node.draining]
    words = [f"gone since round {job.n}: {_some(gone)}"] if gone else []
    words += [f"leaving: {_some(leaving)}"] if leaving else []
    excluded = [f"{exclusion}" for exclusion in job.exclusions if exclusion.host in machines]
    unhealthy = [f"{one.id} is unhealthy: {one.unhealthy}" for one in job.nodes if one.unhealthy]
    words += [_some(each, "; ") for each in (excluded, unhealthy, _aside(job)) if each]
    return "".join(f"; {each}" for each in words)


def _aside(job: Snapshot) -> list[str]:
    """The live nodes that are set aside, and why."""
    return [f"{one}" for one in job.aside if job.node(one.node) is not None]


def _watch(job: Snapshot, seen: Observation, timing: Timing) -> Decision:
    # Of no members nobody is done: somebody has deleted the key.
    if job.members.nodes and all(member.id in job.done for member in job.members.nodes):
        return go(Move.FINISH, "every worker has exited with 0")
    # The first rule that returns a decision decides.
    for rule in _WATCH_RULES:
        decision = rule(job, seen, timing)
        if decision is not None:
            return decision
    return Decision(None, runs(job))


def runs(job: Snapshot) -> str:
    """The status of a round in which nothing is due."""
    nodes = len(job.members.nodes)
    return f"round {job.n} runs on {nodes} node{'s' if nodes != 1 else ''}"


def _a_worker_failed(job: Snapshot, seen: Observation, timing: Timing) -> Decision | None:
    causes = [failure for failure in job.failures if not failure.symptom]
    if not causes:
        return None
    if job.yielding is not None and causes[0].revision > job.yield_revision:
        # Workers of other nodes have begun to leave: what breaks now is collateral, and free.
        return go(Move.FORM, job.yielding)
    # Later the world may be another one, which a restart may change once more.
    permanent = causes[0].permanent and job.n == 1 and not job.reached
    failed = {cause.node for cause in causes}
    # Workers that fail on several hosts at once do not fail because of a host.
    machines = {member.machine for member in job.members.nodes if member.id in failed}
    host = machines.pop() if len(machines) == 1 else ""
    return _interrupt(job, causes[0].summary, workers=True, host=host, permanent=permanent)


def _a_node_is_lost(job: Snapshot, seen: Observation, timing: Timing) -> Decision | None:
    """A member's lease has expired, or another node has evicted it: form a round without it."""
    if not job.lost:
        return None
    lost = [node for node in job.lost if node.id not in job.leaving]
    names = _some([node.id for node in lost or job.lost])
    if not lost:
        # A preemption: the machine was taken away before its workers came to a step boundary.
        text = f"{names} had to leave, and went before the step boundary; no restart is charged"
        return go(Move.FORM, text)
    # Under the id of a lost member another agent process may be here: that member does not return.
    here = {node.id for node in job.nodes}
    gone = [node for node in lost if node.id in here or node.agent in seen.ended]
    if seen.heard_s < timing.return_within_s and not gone:
        # Leases lapse while nobody can refresh them: that says nothing about the nodes.
        text = f"etcd may have been silent; waiting for node {names} to register again"
        return Decision(None, text)
    # If several hosts are lost at once, the cause is what they share, such as a switch.
    machines = {node.machine for node in lost}
    host = machines.pop() if len(machines) == 1 else ""
    return _interrupt(job, f"lost node {names}", host=host)


def _a_link_is_dead(job: Snapshot, seen: Observation, timing: Timing) -> Decision | None:
    """Members that make no progress do not reach each other: the job goes on without some."""
    if not job.dead_links:
        return None
    known = job.looked | job.done | job.quiet
    silent = [member.id for member in job.live_members if member.id not in known]
    # A node that has died looks at nothing: by then its lease has told.
    if silent and seen.links_s < max(timing.symptom_patience_s, job.members.leases_end_s):
        return Decision(None, f"{_dead(job)}; waiting for what {_some(silent)} can reach")
    goes = who_goes([member.id for member in job.members.nodes], job.dead_links)
    ends = unreached(job.dead_links)
    aside: tuple[SetAside, ...] = ()
    for node in goes:
        why = f"it does not reach {_some(with_addresses(job.members, ends[node]))}"
        aside += (SetAside(node=node, why=why, others=tuple(sorted(ends[node]))),)
    if job.stop is not None or job.yielding is not None:
        return go(Move.FORM, f"{_dead(job)}; {job.stop or job.yielding}", aside=aside)
    left = sum(node.id not in goes for node in job.eligible)
    if not job.spec.is_enough(left):
        # At the minimum the job waits for the link, for free: no restart would help.
        needs = f"the job needs {job.spec.fewest} nodes, and waits for the link"
        return go(Move.FORM, f"{_dead(job)}; {needs}; no restart is charged", aside=aside)
    who = _some([f"{node} ({why})" for node, why in goes.items()])
    return _interrupt(job, f"{_dead(job)}; the job goes on without {who}", aside=aside)


def _dead(job: Snapshot) -> str:
    """The dead links in words."""
    # Those alone that are named are put in words: that takes a look at all members for each.
    links = [*job.dead_links.items()]
    return _some(links, "; ", lambda link: link_in_words(job.members, *link))


def _a_symptom_has_no_cause(job: Snapshot, seen: Observation, timing: Timing) -> Decision | None:
    symptoms = [failure for failure in job.failures if failure.node not in job.released]
    if not symptoms:
        return None
    first, live = symptoms[0].summary, {member.id for member in job.live_members}
    # Their peers were those of a node that was told to go, before they could leave together.
    if left := [one.id for one in job.members.nodes if one.id in job.quiet - live]:
        return go(Move.FORM, f"the workers of {_some(left)} left")
    if seen.symptom_s < timing.symptom_patience_s:
        return Decision(None, f"{first}; waiting for the cause")
    # Nodes that have lost a peer look at their links: a dead one would be the cause.
    silent = [one.node for one in symptoms if one.node in live - job.looked]
    if silent and seen.symptom_s < 2 * timing.symptom_patience_s:
        return Decision(None, f"{first}; waiting for what {_some(silent)} can reach")
    ended = [one.id for one in job.members.nodes if one.id in job.done]
    gone = f"the workers of {_some(ended)} have ended with exit code 0"
    cause = gone if ended else "no cause appeared"
    return _interrupt(job, f"{first}, and {cause}", symptom=True)


def _members_leave(job: Snapshot, seen: Observation, timing: Timing) -> Decision | None:
    if job.yielding is not None:
        busy = [m.id for m in job.live_members if m.id not in job.at_rest]
        # Where some have lost their peers, no boundary will come: the others see that, or hang.
        hopeless = job.released and seen.symptom_s >= timing.symptom_patience_s
        if busy and not hopeless:
            text = f"{job.yielding}; waiting for {_some(busy)} to stop"
            return Decision(None, text, Wait.WORKERS)
        return go(Move.FORM, job.yielding)
    if left := [m.id for m in job.members.nodes if m.id in job.quiet]:
        return go(Move.FORM, f"the workers of {_some(left)} left")
    # Nobody has been asked to leave so far. Who asks for it?
    if job.stop is not None:
        return go(Move.YIELD, job.stop)
    # I12: of `unfinished`, since workers that are done need nobody to leave for them.
    if draining := [node.id for node in job.unfinished if node.draining]:
        return go(Move.YIELD, f"{_some(draining)} {'is' if len(draining) == 1 else 'are'} leaving")
    reasons = [str(e) for node in job.unfinished if (e := job.barred(node))]
    return go(Move.YIELD, _some(reasons, "; ")) if reasons else None


def _room_for_joiners(job: Snapshot, seen: Observation, timing: Timing) -> Decision | None:
    if not job.joiners:
        return None
    names = _some([node.id for node in job.joiners])
    here = len(job.members.nodes)
    # Nobody joins: the next round would begin again what these have finished.
    if job.done:
        return Decision(None, f"the workers of {_some(sorted(job.done))} are done; spare: {names}")
    # Reasons that no time changes come first; then those that pass.
    more = job.spec.usable(here + len(job.joiners)) - here
    if more <= 0:
        is_full = here >= job.spec.usable(job.spec.max_nodes)
        units = f"rounds have multiples of {job.spec.node_unit} nodes"
        why = f"round {job.n} is full" if is_full else units
        return Decision(None, f"{why}; spare: {names}")
    if seen.nodes_s < timing.grow_after_s:
        return Decision(None, f"{names} will join when the set of nodes is steady")
    # The additional nodes must earn back what a re-forming costs all nodes. Nobody knows how long
    # the next round will last; so this one first runs for as long as that takes, and nodes that
    # come one after the other cost about half of the time at most. The first growth waits for
    # nothing, since no cost is known yet, nor does one after a failure: a node is back.
    cost_s = max(job.took_s, seen.reform_s)
    wait_s = min(cost_s * here / more, timing.longest_growth_wait_s)
    why = f"a re-forming takes {here} nodes {cost_s:.1f} s"
    if timing.grow_every_s is not None:
        wait_s, why = timing.grow_every_s, "growth was asked to be no more frequent"
    if seen.round_s < wait_s:
        when = f"when round {job.n} has run for {wait_s:.0f} s"
        return Decision(None, f"{names} will join {when}: {why} (--grow-every)")
    return go(Move.YIELD, f"{names} join{'s' if len(job.joiners) == 1 else ''}")


def _ended(job: Snapshot, seen: Observation, timing: Timing) -> Decision:
    return Decision(None, f"the job is {job.state}: {job.cause}")


# ---- what a failure costs ----


def _interrupt(
    job: Snapshot,
    cause: str,
    *,
    workers: bool = False,
    symptom: bool = False,
    host: str = "",
    permanent: bool = False,
    aside: tuple[SetAside, ...] = (),
) -> Decision:
    """A failure: one restart of the budget, or the end of the job when none is left or can help."""
    if job.stop is not None:  # no restart, so no charge: FORMING carries out the stop
        return go(Move.FORM, f"{cause}; nothing restarts, {job.stop}")
    charge = Charge(
        n=job.n,
        cause=cause,
        committed=job.committed,
        reached=job.reached,
        workers=workers,
        symptom=symptom,
        host=host,
    )
    same_error = (Move.FAIL, "a restart would meet the same error")
    if ending := same_error if permanent else _no_more(job, charge):
        move, why = ending
        return go(move, f"{cause}; {why}", charge=charge)
    exclusion, remark = _excluded_by(job, host, lost=not workers)
    if exclusion is not None:  # by this, the next exclusion of the host is twice as long
        charge = replace(charge, excluded_s=exclusion.for_s)
    said = f"{cause}; restart {job.spent + 1} of {job.spec.max_restarts}{remark}"
    return go(Move.INTERRUPT, said, charge=charge, exclusion=exclusion, aside=aside)


def _no_more(job: Snapshot, charge: Charge) -> tuple[Move, str] | None:
    """The end of the job by this failure, and why: budget spent, or a crash loop; None: no end."""
    budget, refill = job.spec.max_restarts, job.spec.refill_after_steps
    if job.spent >= budget:
        text = f"all {budget} restarts are spent" if budget else "no restarts are allowed"
        if budget and refill:
            step = next_refill(job.charged, job.committed, refill)
            text += f"; the next would come back at step {step}"
        return Move.FAIL, f"{text} (--max-restarts)"
    # The loss of a node is no sign of a crash loop: nothing of the job has caused it.
    patience = job.spec.max_restarts_without_progress
    loops = 0 < patience <= fruitless(job.charged, charge.reached)
    if loops and (charge.workers or charge.symptom):
        return Move.GIVE_UP, (
            f"no step after {charge.reached} was finished in {patience} restarts in a row "
            "(--max-restarts-without-progress)"
        )
    return None


def _excluded_by(job: Snapshot, host: str, *, lost: bool) -> tuple[Exclusion | None, str]:
    """The exclusion that a failure of this host causes, and a remark for the message."""
    spec = job.spec
    after, first_s = spec.exclude_after, spec.exclude_for_s
    found = due(job.charged, host, after=after, first_s=first_s, lost=lost)
    others = sum(1 for node in job.eligible if node.machine != host)
    if found is None or not others:  # a job on one host has nowhere else to go
        return None, ""
    if not spec.is_enough(others):
        left = f"{others} of {spec.min_nodes}:{spec.max_nodes} nodes would be left without it"
        return None, f"; {host} stays although {found.why}: {left}"
    return found, f"; {found}"


_Rule = Callable[[Snapshot, Observation, Timing], Decision | None]
# What is certain comes first: a symptom may follow from a failure, a loss or a dead link.
_WATCH_RULES: Sequence[_Rule] = (
    _a_worker_failed,
    _a_node_is_lost,
    _a_link_is_dead,
    _a_symptom_has_no_cause,
    _members_leave,
    _room_for_joiners,
)
_DECIDE: Mapping[State | None, Callable[[Snapshot, Observation, Timing], Decision]] = {
    None: _open,
    State.FORMING: _form,
    State.ACTIVE: _watch,
    State.DONE: _ended,
    State.FAILED: _ended,
    State.STOPPED: _ended,
}
