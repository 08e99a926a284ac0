"""Exhaustive search of small jobs: every order of reads, decisions, faults and late writes.

`tests/model` says what a job can do; here are the jobs that are searched, and the proof that the
search would notice: whichever comparison is taken out of whichever transaction, it finds a world
in which an invariant is broken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.model import world as model
from tests.model.search import explore, running
from tests.model.world import KEYS, World, begin, stop, write
from zero_orchestrator.membership import rounds
from zero_orchestrator.membership.failures import Charge
from zero_orchestrator.membership.job_state import Snapshot
from zero_orchestrator.membership.moves import LEGAL, Move, Transition, transaction
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.store.kv import Compare, Put

SMALL_JOBS = {
    "two nodes that come and go": (2, (1, 2), 1, 1, 3),
    "two nodes, both needed, no restarts": (2, (2, 2), 0, 1, 2),
    "one node and a spare": (2, (1, 1), 1, 1, 2),
    "three nodes, two places": (3, (1, 2), 0, 0, 3),
    "three nodes that come one by one": (3, (1, 3), 1, 0, 3),
}
"""Nodes there are, nodes wanted, restarts allowed, faults that happen, rounds looked at."""


@pytest.mark.parametrize(
    ("nodes", "bounds", "restarts", "faults", "max_round"), SMALL_JOBS.values(), ids=SMALL_JOBS
)
@pytest.mark.corners(max_round=[2], nodes=[2, 3])
def test_no_order_of_events_breaks_an_invariant(nodes, bounds, restarts, faults, max_round):
    spec = JobSpec(min_nodes=bounds[0], max_nodes=bounds[1], max_restarts=restarts)
    assert explore(begin(spec, nodes, faults), max_round) > 500


@pytest.mark.full
def test_no_fault_of_three_running_nodes_breaks_an_invariant():
    spec = JobSpec(min_nodes=2, max_nodes=3, max_restarts=1)
    assert explore(running(begin(spec, 3, faults=1)), max_round=1) > 500


STOPPED_JOBS = {
    "one node that comes back": (1, (1, 1), 1, 1, 2),
    "two nodes, no restarts": (2, (1, 2), 0, 0, 1),
}
"""As above."""


@pytest.mark.parametrize(
    ("nodes", "bounds", "restarts", "faults", "max_round"),
    STOPPED_JOBS.values(),
    ids=STOPPED_JOBS,
)
def test_a_stop_asked_for_at_any_time_ends_the_job_for_everybody(
    nodes, bounds, restarts, faults, max_round
):
    spec = JobSpec(min_nodes=bounds[0], max_nodes=bounds[1], max_restarts=restarts)
    assert explore(begin(spec, nodes, faults, may_stop=True), max_round) > 200


def test_whoever_is_told_to_leave_at_any_time_keeps_nobody_waiting():
    spec = JobSpec(min_nodes=1, max_nodes=2)
    assert explore(begin(spec, 2, faults=0, drains=1), max_round=2) > 500


PARKING_JOBS = {
    "two nodes, one of which is told to leave": pytest.param(2, 1, 0, 2),
    "two nodes, and a fault": pytest.param(2, 0, 1, 2, marks=pytest.mark.full),
    "two nodes that come, one of which is told to leave": pytest.param(
        0, 1, 0, 2, marks=pytest.mark.full
    ),
    "a node that is joined by another, and a fault": pytest.param(
        1, 0, 1, 2, marks=pytest.mark.full
    ),
    "two nodes that go and come back, and a fault": pytest.param(
        2, 1, 1, 3, marks=pytest.mark.full
    ),
}
"""Nodes of two that run, nodes that are told to leave, faults that happen, rounds looked at."""


def parking(runs, drains, faults):
    """Workers that leave may wait in their processes; `runs` of two nodes are in round 1.

    A fault leads to another round where nothing else happens.
    """
    spec = JobSpec(min_nodes=1, max_nodes=2, max_restarts=0 if drains or runs == 1 else faults)
    both = begin(spec, 2, faults, drains=drains, parks=True)
    first = running(replace(both, agents=both.agents[:runs]))
    return replace(first, agents=(*first.agents, *both.agents[runs:]))


@pytest.mark.parametrize(
    ("runs", "drains", "faults", "max_round"), PARKING_JOBS.values(), ids=PARKING_JOBS
)
def test_workers_that_wait_in_their_processes_keep_nobody_waiting(runs, drains, faults, max_round):
    assert explore(parking(runs, drains, faults), max_round) > 200


WARMING_JOBS = {
    "a node that is joined by another": pytest.param(1, (1, 2), 0, 0, 2),
    "a node that is joined by another, and a fault": pytest.param(
        1, (1, 2), 0, 1, 2, marks=pytest.mark.full
    ),
    "two nodes, and a fault": pytest.param(2, (1, 2), 0, 1, 3, marks=pytest.mark.full),
    "two nodes, both needed, and a fault": pytest.param(2, (2, 2), 0, 1, 2, marks=pytest.mark.full),
    "a node that is joined by another, and told to leave": pytest.param(
        1, (1, 2), 1, 0, 2, marks=pytest.mark.full
    ),
}
"""Nodes of two that run, nodes wanted, nodes that are told to leave, faults, rounds looked at."""


@pytest.mark.parametrize(
    ("runs", "bounds", "drains", "faults", "max_round"), WARMING_JOBS.values(), ids=WARMING_JOBS
)
def test_workers_that_warm_up_keep_nobody_waiting(runs, bounds, drains, faults, max_round):
    spec = JobSpec(min_nodes=bounds[0], max_nodes=bounds[1], max_restarts=faults)
    both = begin(spec, 2, faults, drains=drains, parks=True, warms=True)
    first = running(replace(both, agents=both.agents[:runs]))
    newcomers = both.agents[runs:]
    assert explore(replace(first, agents=(*first.agents, *newcomers)), max_round) > 200


FINISHING_JOBS = {
    "two nodes, both needed, one of which is told to leave": (2, (2, 2), 0, 1),
    "two nodes, both needed, one of which dies": (2, (2, 2), 1, 0),
    "a third node, which comes at any time": (3, (2, 3), 0, 0),
}
"""Nodes there are, nodes wanted, faults that happen, nodes that are told to leave."""


@pytest.mark.parametrize(
    ("nodes", "bounds", "faults", "drains"), FINISHING_JOBS.values(), ids=FINISHING_JOBS
)
def test_what_happens_to_a_node_that_has_finished_costs_the_others_nothing(
    nodes, bounds, faults, drains
):
    spec = JobSpec(min_nodes=bounds[0], max_nodes=bounds[1], max_restarts=0)
    first = running(begin(spec, 2, faults, drains=drains, late=True))
    newcomers = begin(spec, nodes, 0).agents[2:]
    assert explore(replace(first, agents=(*first.agents, *newcomers)), max_round=1) > 20


STUCK_JOBS = {
    "two nodes": pytest.param(1, 0),
    "two nodes and a fault": pytest.param(1, 1, marks=pytest.mark.full),
    "two nodes, no restarts": pytest.param(0, 0),
}
"""Restarts allowed, faults that happen."""


@pytest.mark.parametrize(("restarts", "faults"), STUCK_JOBS.values(), ids=STUCK_JOBS)
def test_a_worker_that_cannot_be_killed_keeps_no_other_node_waiting_and_commits_nothing(
    restarts, faults
):
    spec = JobSpec(min_nodes=1, max_nodes=2, max_restarts=restarts)
    assert explore(running(begin(spec, 2, faults, sticks=1)), max_round=2) > 200


BROKEN_JOBS = {
    "two nodes, both needed": pytest.param(2, (2, 2), 0, 0),
    "two nodes that can be alone": pytest.param(2, (1, 2), 1, 0, marks=pytest.mark.full),
    "two nodes and a fault": pytest.param(2, (1, 2), 1, 1, marks=pytest.mark.full),
}
"""Nodes there are, nodes wanted, restarts allowed, faults that happen."""


def breaking(nodes, bounds, restarts, faults):
    """They run, and one link may break at any time."""
    spec = JobSpec(min_nodes=bounds[0], max_nodes=bounds[1], max_restarts=restarts)
    return running(begin(spec, nodes, faults, breaks=1))


@pytest.mark.parametrize(
    ("nodes", "bounds", "restarts", "faults"), BROKEN_JOBS.values(), ids=BROKEN_JOBS
)
def test_a_link_that_breaks_at_any_time_keeps_nobody_waiting_whose_job_can_go_on(
    nodes, bounds, restarts, faults
):
    assert explore(breaking(nodes, bounds, restarts, faults), max_round=1) > 500


def test_a_round_machine_that_knows_no_links_waits_for_ever_on_a_silent_one(monkeypatch):
    knows = [rule for rule in rounds._WATCH_RULES if rule is not rounds._a_link_is_dead]
    monkeypatch.setattr(rounds, "_WATCH_RULES", knows)
    with pytest.raises(AssertionError, match="I6: stuck"):
        explore(breaking(2, (2, 2), 0, 0), max_round=1)


@pytest.mark.full
def test_a_stop_ends_a_running_job_although_a_node_fails_meanwhile():
    spec = JobSpec(min_nodes=2, max_nodes=2)
    assert explore(stop(running(begin(spec, 2, faults=1))), max_round=1) > 500


# ---- every comparison is needed ----


def two(**spec: int) -> JobSpec:
    return JobSpec(**{"min_nodes": 1, "max_nodes": 2, "max_restarts": 1, **spec})


COMING = begin(two(), 2, faults=0)
STOPPING = begin(two(), 2, faults=0, may_stop=True)
REFILLING = running(begin(two(refill_after_steps=1), 2, faults=1, commits=1))
SPENT = running(begin(two(max_restarts=0), 2, faults=1, commits=1))
EARLIER = Charge(n=0, cause="", reached=1, workers=True)
LOOPING = write(
    running(begin(two(max_restarts=9, max_restarts_without_progress=1), 2, faults=1, commits=1)),
    [],
    [Put(KEYS.charged(0), EARLIER.to_json())],
)[0]

WORLDS: Mapping[Move, World] = {
    Move.OPEN: COMING,
    Move.ACTIVATE: STOPPING,
    Move.YIELD: COMING,
    Move.FORM: COMING,
    Move.INTERRUPT: REFILLING,
    Move.FAIL: SPENT,
    Move.GIVE_UP: LOOPING,
    Move.FINISH: COMING,
    Move.HALT: STOPPING,
}
"""A job in which each comparison of a move is missed."""


def compares_of(move: Move) -> list[Compare]:
    """What the product compares in this transition."""
    source, _ = LEGAL[move]
    charge = Charge(n=1, cause="") if move in {Move.INTERRUPT, Move.FAIL, Move.GIVE_UP} else None
    job = Snapshot(spec=two(), state=source, n=1, fence=1)
    return transaction(KEYS, job, Transition(move, "", charge=charge))[0]


MUTANTS = [(move, index) for move in Move for index in range(len(compares_of(move)))]
NAMES = [
    f"{move} without {compares_of(move)[i].key.removeprefix(KEYS.prefix)}" for move, i in MUTANTS
]


@pytest.mark.parametrize(("mutated", "index"), MUTANTS, ids=NAMES)
def test_without_any_one_comparison_an_invariant_breaks(mutated, index, monkeypatch):
    def careless(keys, job, move):
        compares, writes = transaction(keys, job, move)
        kept = [compare for i, compare in enumerate(compares) if i != index]
        return (kept if move.move is mutated else compares), writes

    monkeypatch.setattr(model, "transaction", careless)
    with pytest.raises(AssertionError, match=r"I\d+:"):
        explore(WORLDS[mutated], max_round=2)
