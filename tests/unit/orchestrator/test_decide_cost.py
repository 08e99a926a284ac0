"""What a decision costs grows with the number of nodes, not with its square: counted, not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from zero_orchestrator.membership.failures import Exclusion
from zero_orchestrator.membership.job_state import Failure, Members, Node, Snapshot, State
from zero_orchestrator.membership.rounds import Move, Observation, Timing, decide
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.observe import status

LARGE = 2000
STEADY = Observation(nodes_s=60.0, symptom_s=60.0)


class Counted(str):
    """A name whose comparisons are counted, also those that C code makes in a container."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def nodes(count: int) -> tuple[Node, ...]:
    return tuple(
        Node(
            id=Counted(f"node-{index:05}"),
            incarnation=Counted(f"{index:08x}"),
            address="10.0.0.1",
            slots=8,
            host=Counted(f"host-{index:05}"),
        )
        for index in range(count)
    )


def running(count: int) -> Snapshot:
    """Every node is a member of the round."""
    everyone = nodes(count)
    spec = JobSpec(min_nodes=1, max_nodes=count, max_restarts=9)
    return Snapshot(
        spec, n=1, state=State.ACTIVE, fence=7, nodes=everyone, members=Members(everyone)
    )


def excluded(job: Snapshot) -> Snapshot:
    """Half of the hosts are, and the minimum cannot be met without them."""
    hosts = (node.host for node in job.nodes[::2])
    return replace(
        job,
        spec=replace(job.spec, min_nodes=len(job.nodes)),
        exclusions=tuple(Exclusion(host=host, why="somebody", by_user=True) for host in hosts),
    )


def failed(job: Snapshot, *, symptom: bool) -> Snapshot:
    """Every node says so."""
    reports = (Failure(node=n.id, symptom=symptom, summary="", revision=9) for n in job.nodes)
    return replace(job, failures=tuple(reports))


def forming(job: Snapshot) -> Snapshot:
    """Half of the members are gone, and as many others have come."""
    count = len(job.nodes) // 2
    gone = tuple(replace(node, id=Counted(f"gone-{node.id}")) for node in job.nodes[:count])
    members = tuple(node for pair in zip(gone, job.nodes, strict=False) for node in pair)
    quiet = frozenset(node.id for node in members)
    return replace(job, state=State.FORMING, members=Members(members), quiet=quiet)


SITUATIONS: dict[str, Callable[[Snapshot], Snapshot]] = {
    "runs": lambda job: job,
    "half are excluded": excluded,
    "half are excluded, forming": lambda job: forming(excluded(job)),
    "all drain": lambda job: replace(
        job, nodes=tuple(replace(node, draining=True) for node in job.nodes)
    ),
    "all failed": lambda job: failed(job, symptom=False),
    "all lost a peer": lambda job: failed(job, symptom=True),
    "half are lost": lambda job: replace(job, nodes=job.nodes[::2]),
    "all leave": lambda job: replace(job, yielding="because", yield_revision=8),
    "half would join": lambda job: replace(job, members=Members(job.nodes[::2])),
    "half are unhealthy": lambda job: replace(
        forming(job),
        spec=replace(job.spec, min_nodes=len(job.nodes)),
        nodes=tuple(
            replace(node, unhealthy="no GPU" if index % 2 else "")
            for index, node in enumerate(job.nodes)
        ),
    ),
    "the first round begins": lambda job: replace(job, state=State.FORMING, n=0, members=Members()),
    "another round begins": forming,
}


def look(job: Snapshot) -> None:
    decide(job, STEADY, Timing())


def operations(job: Snapshot, work: Callable[[Snapshot], object] = look) -> int:
    """Instructions of the interpreter and comparisons of names that one decision takes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    Counted.comparisons = 0
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work(job)
    finally:
        sys.settrace(before)
    return count + Counted.comparisons


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_decision_about_twice_as_many_nodes_costs_twice_as_much(name):
    small, twice = (operations(SITUATIONS[name](running(count))) for count in (100, 200))
    assert twice < 2.3 * small


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_status_of_twice_as_many_nodes_costs_twice_as_much(name):
    def rows(job: Snapshot) -> None:
        status.rows(job, {})

    small, twice = (operations(SITUATIONS[name](running(count)), rows) for count in (100, 200))
    assert twice < 2.3 * small


@pytest.mark.parametrize("name", ["runs", "half are excluded", "another round begins"])
def test_a_decision_about_two_thousand_nodes_costs_a_few_steps_for_each(name):
    assert operations(SITUATIONS[name](running(LARGE))) < 400 * LARGE


def test_a_sentence_about_a_large_job_names_a_few_nodes_and_the_number_of_the_others():
    job = SITUATIONS["half are excluded, forming"](running(LARGE))
    sentence = decide(job, STEADY, Timing()).reason
    assert sentence.endswith("and 992 more")
    assert len(sentence) < 1000
    lost = decide(SITUATIONS["half are lost"](running(LARGE)), STEADY, Timing())
    assert lost.transition is not None
    assert lost.transition.move is Move.INTERRUPT
    assert "node-00015 and 992 more; restart 1 of 9" in lost.reason
