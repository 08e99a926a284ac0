"""What an agent's log is told while the job waits, and what helps when it has waited too long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.manual_clock import ManualClock
from zero_agent.loop.limits import AGAIN_S, REMEDIES, LogLimit
from zero_orchestrator.membership.job_state import Members, Node, Snapshot, State
from zero_orchestrator.membership.rounds import Observation, Timing, Wait, decide
from zero_orchestrator.membership.spec import JobSpec

ONE = JobSpec(min_nodes=1, max_nodes=1)
A = Node(id="a", incarnation="1", address="a", slots=1)
BUSY = Snapshot(ONE, n=1, state=State.FORMING, nodes=(A,), members=Members((A,)))


def test_a_drain_of_many_nodes_is_one_waiting_line_and_not_one_for_each_that_stops():
    limit = LogLimit(ManualClock())
    names = "abcdef"
    told = [f"a is leaving; waiting for {', '.join(names[i:])} to stop" for i in range(5)]
    told += [f"waiting for the workers of {', '.join(names[i:])} to stop" for i in range(5)]
    told += ["round 2 begins with 5 of 1:6 nodes", "round 2 runs on 5 nodes"]
    waits = [Wait.WORKERS] * 10 + [None] * 2
    news = [line for line, wait in zip(told, waits, strict=True) if limit.is_news(line, wait)]
    assert news == [told[0], *told[-2:]]


def test_a_wait_that_is_long_is_told_again_with_those_that_are_left():
    clock = ManualClock()
    limit = LogLimit(clock)
    assert limit.is_news("waiting for the workers of a, b to stop", Wait.WORKERS)
    assert not limit.is_news("waiting for the workers of b to stop", Wait.WORKERS)
    clock.advance(AGAIN_S + 1)
    assert limit.is_news("waiting for the workers of b to stop", Wait.WORKERS)
    clock.advance(AGAIN_S + 1)
    nothing_new = not limit.is_news("waiting for the workers of b to stop", Wait.WORKERS)
    assert nothing_new
    assert limit.is_news("round 2 runs on 1 node")
    assert limit.is_news("waiting for the workers of b to stop", Wait.WORKERS), "another wait"


@pytest.mark.parametrize(
    ("job", "reason", "helps"),
    [
        (BUSY, "waiting for the workers of a to stop", "`zero-ctl drain NODE`"),
        (
            replace(BUSY, state=State.ACTIVE, yielding="a is leaving"),
            "a is leaving; waiting for a to stop",
            "`zero-ctl drain NODE`",
        ),
        (
            Snapshot(ONE, state=State.FORMING, nodes=(replace(A, unhealthy="no disk"),)),
            "0 of 1:1 nodes are here; waiting for 1; a is unhealthy: no disk",
            "Repair those nodes",
        ),
        (
            Snapshot(replace(ONE, min_nodes=2, max_nodes=4), state=State.FORMING, nodes=(A,)),
            "1 of 2:4 nodes are here; waiting for 1",
            "Start more agents",
        ),
    ],
)
def test_the_remedy_fits_what_is_waited_for(job, reason, helps):
    decision = decide(job, Observation(nodes_s=60, symptom_s=0), Timing())
    assert decision.reason == reason
    assert helps in REMEDIES[decision.waits_for]


def test_every_wait_has_a_remedy():
    assert set(REMEDIES) == {None, *Wait}
