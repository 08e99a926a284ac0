"""What an agent takes its node's time to be used for."""

from dataclasses import replace

import pytest

from tests.support.manual_clock import ManualClock
from zero_agent.loop.observed.node_time import NodeTime, doing
from zero_agent.loop.supervise import Situation
from zero_agent.node.state import Workers
from zero_contract.worker import Progress
from zero_orchestrator.membership.failures import Exclusion
from zero_orchestrator.membership.job_state import Failure, Members, Node, Snapshot, State
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.observe.goodput import Doing, Use

ME = Node(id="me", incarnation="1", address="me", slots=1)
OTHER = replace(ME, id="other")
SPEC = JobSpec(min_nodes=2, max_nodes=2)
OUT = Exclusion(host="me", why="the user", for_s=0, by_user=True)


def job(state: State | None, *, n: int = 2, nodes=(ME, OTHER), **facts) -> Snapshot:
    facts = {"members": Members(nodes), **facts}
    return Snapshot(SPEC, n=n, state=state, nodes=nodes, **facts)


def situation(snapshot: Snapshot, workers: Workers, node: Node = ME) -> Situation:
    return Situation(job=snapshot, node=node, workers=workers, round=snapshot.n)


@pytest.mark.parametrize(
    ("snapshot", "workers", "expected"),
    [
        (job(None, n=0), Workers.NONE, Doing.WAITING),
        (job(State.FORMING, n=0), Workers.NONE, Doing.WAITING),
        (job(State.FORMING), Workers.STOPPED, Doing.FORMING),
        (job(State.FORMING, nodes=(ME,)), Workers.STOPPED, Doing.WAITING),
        (job(State.FORMING), Workers.STOPPING, Doing.FORMING),
        (job(State.ACTIVE), Workers.NONE, Doing.FORMING),
        (job(State.ACTIVE), Workers.RUNNING, Doing.RUNNING),
        (job(State.ACTIVE), Workers.PEER_LOST, Doing.FORMING),
        (job(State.ACTIVE), Workers.SUCCEEDED, Doing.ENDING),
        (job(State.ACTIVE, members=Members((OTHER,))), Workers.NONE, Doing.IDLE),
        (job(State.FORMING, exclusions=(OUT,)), Workers.FAILED, Doing.IDLE),
        (job(State.FAILED), Workers.FAILED, Doing.ENDING),
    ],
)
def test_what_a_node_does(snapshot, workers, expected):
    assert doing(situation(snapshot, workers), prepared=True) is expected


def test_a_node_that_imports_starts_and_one_that_is_unhealthy_idles():
    forming = job(State.FORMING, n=0)
    assert doing(situation(forming, Workers.NONE), prepared=False) is Doing.STARTING
    sick = replace(ME, unhealthy="no GPU")
    assert doing(situation(forming, Workers.NONE, sick), prepared=True) is Doing.IDLE


def test_every_second_of_a_node_with_a_failure_has_one_use():
    clock = ManualClock()
    time = NodeTime(clock)

    def look(snapshot: Snapshot, workers: Workers) -> None:
        time.look(situation(snapshot, workers), prepared=True, reports=True)

    def step(number: int, after_s: float, rank: int = 0, saving_s: float = 0.0) -> None:
        clock.advance(after_s)
        time.report(rank, Progress(step=number, saving_s=saving_s), None)

    clock.advance(2.0)
    look(job(State.FORMING, n=0), Workers.NONE)
    clock.advance(3.0)
    look(job(State.ACTIVE, n=1), Workers.RUNNING)
    step(1, 4.0)
    step(2, 1.0)
    step(2, 0.5, rank=1)  # the node has another worker, which is a little later
    step(3, 1.0, saving_s=0.25)
    clock.advance(2.0)
    lost = Failure(node="other", symptom=False, summary="", step=3)
    look(job(State.FORMING, n=1, failures=(lost,)), Workers.STOPPED)
    clock.advance(1.0)
    look(job(State.ACTIVE, n=2), Workers.RUNNING)
    step(2, 3.0)
    step(3, 1.0, rank=0)
    step(4, 1.0)
    clock.advance(0.5)
    assert time.used_ns() == {
        Use.STARTING: 6_000_000_000,
        Use.WAITING: 3_000_000_000,
        Use.USEFUL: 3_750_000_000,
        Use.SAVING: 250_000_000,
        Use.REFORMING: 6_000_000_000,
        Use.REPEATED: 1_000_000_000,
    }
    assert sum(time.used_ns().values()) == round(clock.now() * 1e9)


def test_the_time_of_the_process_before_its_agent_is_in_the_ledger():
    before_ns = {Use.STARTING: 2 * 10**9, Use.IDLE: 10**9}
    clock = ManualClock()
    node_time = NodeTime(clock, before_ns)
    clock.advance(3)
    assert node_time.used_ns() == {Use.STARTING: 5 * 10**9, Use.IDLE: 10**9}
