"""What an agent does next, in every situation that a user can get it into."""

from dataclasses import replace

import pytest

from zero_agent.loop.supervise import Action, Situation, next_action
from zero_agent.node.state import WAITING, Workers
from zero_orchestrator.membership.dead_links import SetAside
from zero_orchestrator.membership.job_state import ENDED, Failure, Members, Node, Snapshot, State
from zero_orchestrator.membership.spec import JobSpec

ME = Node(id="me", incarnation="1", address="me", slots=1)
OTHER = replace(ME, id="other")
SPEC = JobSpec(min_nodes=1, max_nodes=2)


def job(state: State | None, *, n: int = 2, members=(ME, OTHER), **facts) -> Snapshot:
    return Snapshot(SPEC, n=n, state=state, nodes=members, members=Members(members), **facts)


def action(snapshot: Snapshot, workers: Workers, round: int = 2, **facts) -> Action:
    now = Situation(job=snapshot, node=ME, workers=workers, round=round, **facts)
    return next_action(now)[0]


RUNS = job(State.ACTIVE, master="host:1")
FORMS = job(State.FORMING)
FAILURE = Failure(node="me", symptom=False, summary="")


@pytest.mark.parametrize(
    ("snapshot", "workers", "expected"),
    [
        (job(None), Workers.NONE, Action.WAIT),
        (job(State.ACTIVE), Workers.NONE, Action.HOST_STORE),
        (job(State.ACTIVE, members=(OTHER, ME)), Workers.NONE, Action.WAIT),
        (RUNS, Workers.NONE, Action.START),
        (job(State.ACTIVE, members=(OTHER,)), Workers.NONE, Action.WAIT),
        (FORMS, Workers.NONE, Action.REPORT_QUIET),
        (job(State.DONE), Workers.NONE, Action.EXIT),
        (job(State.FAILED), Workers.NONE, Action.EXIT),
        (job(State.STOPPED), Workers.NONE, Action.EXIT),
        (replace(RUNS, stop="enough"), Workers.NONE, Action.REPORT_QUIET),
        (replace(RUNS, yielding="other joins"), Workers.NONE, Action.REPORT_QUIET),
    ],
)
def test_an_agent_without_workers(snapshot, workers, expected):
    assert action(snapshot, workers, round=0) is expected


@pytest.mark.parametrize(
    ("snapshot", "expected"),
    [
        (FORMS, Action.ABANDON),
        (RUNS, Action.ABANDON),
        (job(State.FAILED), Action.EXIT),
        (job(State.DONE), Action.EXIT),
    ],
)
def test_workers_that_cannot_be_killed_are_not_waited_for(snapshot, expected):
    assert action(snapshot, Workers.STOPPING, unkillable="it hangs in the kernel") is expected


LEAVES = replace(ME, draining=True)


@pytest.mark.parametrize(
    ("snapshot", "facts", "expected"),
    [
        (FORMS, {}, Action.REPORT_QUIET),
        (replace(FORMS, quiet={"me"}), {}, Action.WAIT),
        (replace(FORMS, quiet={"me"}), {"node": LEAVES}, Action.STOP),
        (replace(RUNS, n=3), {}, Action.START),
        (job(State.ACTIVE, n=3, members=(OTHER,)), {}, Action.STOP),
        (replace(RUNS, n=3, stop="enough"), {}, Action.REPORT_QUIET),
        (job(State.DONE), {}, Action.STOP),
        (job(State.FAILED), {}, Action.STOP),
        (job(State.STOPPED), {}, Action.STOP),
    ],
)
@pytest.mark.parametrize("workers", sorted(WAITING))
def test_workers_that_wait_go_on_or_are_let_go(workers, snapshot, facts, expected):
    now = {"job": snapshot, "node": ME, "workers": workers, "round": 2}
    assert next_action(Situation(**{**now, **facts}))[0] is expected


@pytest.mark.parametrize(
    ("workers", "facts", "expected"),
    [
        (Workers.RUNNING, {"can_stay": True}, Action.RELEASE),
        (Workers.RUNNING, {"can_stay": True, "released": True}, Action.WAIT),
        (Workers.RUNNING, {"released": True}, Action.KILL),  # its time is over
        (Workers.STOPPING, {"can_stay": True}, Action.WAIT),
        (Workers.STRANDED, {"can_stay": True, "released": True}, Action.REPORT_QUIET),
    ],
)
def test_workers_of_a_lost_round_that_may_stay_get_time_to_leave_it(workers, facts, expected):
    assert action(FORMS, workers, **facts) is expected


STARTS, STAYS = replace(ME, starting=True), replace(ME, stays=True)
ALONE = job(State.ACTIVE, members=(OTHER,))
ASIDE = replace(ALONE, aside=(SetAside(node=ME.id, why="", others=()),))
FAILED = replace(FORMS, failures=(FAILURE,))
BOTH_NEEDED = replace(FAILED, spec=JobSpec(min_nodes=2, max_nodes=2))
BOTH_FAILED = replace(FAILED, failures=(FAILURE, replace(FAILURE, node="other")))


@pytest.mark.parametrize(
    ("snapshot", "node", "workers", "round", "expected"),
    [
        # A newcomer.
        (FORMS, STARTS, Workers.NONE, 0, Action.REPORT_QUIET),
        (ALONE, STARTS, Workers.NONE, 0, Action.WARM_UP),
        (ALONE, STARTS, Workers.STARTING, 0, Action.WAIT),
        (ALONE, STARTS, Workers.READY, 0, Action.STAND_BY),
        (ALONE, ME, Workers.READY, 0, Action.WAIT),
        (RUNS, ME, Workers.READY, 0, Action.START),
        (replace(RUNS, yielding="other joins"), ME, Workers.READY, 0, Action.REPORT_QUIET),
        (ALONE, replace(STARTS, draining=True), Workers.STARTING, 0, Action.EXIT),
        (replace(ALONE, state=State.DONE), STARTS, Workers.STARTING, 0, Action.EXIT),
        # A round cannot do without it.
        (RUNS, STARTS, Workers.STARTING, 0, Action.KILL),
        (RUNS, STARTS, Workers.STOPPING, 0, Action.WAIT),
        (RUNS, STARTS, Workers.NONE, 0, Action.START),
        (RUNS, STARTS, Workers.RUNNING, 2, Action.STAND_BY),
        # Somebody kills it.
        (ALONE, STARTS, Workers.FAILED, 0, Action.WARM_UP),
        (ALONE, ME, Workers.FAILED, 0, Action.STAND_BACK),
        # Its links are dead: nobody is to wait for its workers when they work again.
        (ASIDE, STAYS, Workers.STRANDED, 1, Action.STOP),
        (ASIDE, STAYS, Workers.STOPPED, 1, Action.STAND_BACK),
        (ASIDE, replace(STARTS, stays=True), Workers.STOPPED, 1, Action.WARM_UP),
        (ASIDE, replace(STARTS, stays=True), Workers.READY, 0, Action.STAND_BY),
        (ASIDE, STAYS, Workers.READY, 0, Action.WAIT),
        (ASIDE, ME, Workers.STOPPED, 1, Action.WAIT),
        (ALONE, STAYS, Workers.STOPPED, 1, Action.WAIT),
        # A worker of a round has failed.
        (FAILED, STAYS, Workers.FAILED, 2, Action.STAND_BACK),
        (FAILED, replace(STARTS, stays=True), Workers.FAILED, 2, Action.REPORT_QUIET),
        (FAILED, ME, Workers.FAILED, 2, Action.REPORT_QUIET),
        (BOTH_NEEDED, STAYS, Workers.FAILED, 2, Action.REPORT_QUIET),
        (BOTH_FAILED, STAYS, Workers.FAILED, 2, Action.REPORT_QUIET),
    ],
)
def test_a_node_whose_workers_warm_up_is_waited_for_by_nobody(
    snapshot, node, workers, round, expected
):
    now = Situation(job=snapshot, node=node, workers=workers, round=round)
    assert next_action(now)[0] is expected


def test_a_node_whose_workers_cannot_warm_up_joins_without_that():
    now = Situation(job=ALONE, node=STARTS, workers=Workers.FAILED, round=0, cold=True)
    assert next_action(now)[0] is Action.STAND_BY
    assert next_action(replace(now, node=ME))[0] is Action.WAIT


def test_workers_that_only_waited_for_one_that_hangs_stay():
    hangs = replace(FORMS, failures=(replace(FAILURE, hang=True),))
    assert action(hangs, Workers.RUNNING, can_stay=True) is Action.RELEASE
    assert action(hangs, Workers.RUNNING) is Action.KILL


def test_a_node_is_not_quiet_before_it_is_known_to_be_fit():
    assert action(FORMS, Workers.FAILED, checking=True) is Action.WAIT
    assert action(FORMS, Workers.FAILED) is Action.REPORT_QUIET


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        (Workers.RUNNING, Action.WAIT),
        (Workers.STOPPING, Action.WAIT),
        (Workers.SUCCEEDED, Action.REPORT_DONE),
        (Workers.FAILED, Action.REPORT_FAILURE),
        (Workers.PEER_LOST, Action.REPORT_FAILURE),
        (Workers.STRANDED, Action.REPORT_FAILURE),
        (Workers.PARKED, Action.REPORT_QUIET),
        (Workers.LEFT, Action.REPORT_QUIET),
        (Workers.STOPPED, Action.REPORT_QUIET),
    ],
)
def test_how_the_workers_of_a_running_round_end_is_reported_once(workers, expected):
    assert action(RUNS, workers) is expected
    reported = replace(RUNS, done=frozenset({"me"}))
    assert action(reported, workers) is Action.WAIT


@pytest.mark.parametrize("state", [State.FORMING, *sorted(ENDED)])
def test_workers_of_a_round_that_is_over_are_killed(state):
    assert action(job(state), Workers.RUNNING) is Action.KILL
    assert action(job(state), Workers.STOPPING) is Action.WAIT


def test_workers_of_an_older_round_are_killed_before_new_ones_start():
    assert action(RUNS, Workers.RUNNING, round=1) is Action.KILL
    assert action(RUNS, Workers.STOPPED, round=1) is Action.START


def test_a_failed_report_is_not_followed_by_a_start_in_the_same_round():
    assert action(replace(RUNS, failures=(FAILURE,)), Workers.FAILED) is Action.WAIT


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"can_leave": True}, Action.ASK_TO_LEAVE),
        ({"can_leave": True, "asked_to_leave": True}, Action.WAIT),
        ({"can_leave": True, "asked_to_leave": True, "overdue": True}, Action.STOP),
        ({"can_leave": False}, Action.STOP),
    ],
)
def test_workers_leave_at_a_step_boundary_or_are_stopped(facts, expected):
    assert action(replace(RUNS, yielding="other joins"), Workers.RUNNING, **facts) is expected


def test_a_draining_agent_leaves_when_its_workers_have():
    me = replace(ME, draining=True)

    def act(snapshot: Snapshot, workers: Workers, round: int = 2) -> Action:
        now = Situation(job=snapshot, node=me, workers=workers, round=round)
        return next_action(now)[0]

    assert act(RUNS, Workers.LEFT) is Action.REPORT_QUIET
    assert act(replace(RUNS, quiet=frozenset({"me"})), Workers.LEFT) is Action.EXIT
    assert act(replace(FORMS, quiet=frozenset({"me"})), Workers.LEFT) is Action.EXIT
    assert act(job(State.ACTIVE, members=(OTHER,)), Workers.NONE, 0) is Action.EXIT
    assert act(RUNS, Workers.NONE, 0) is Action.REPORT_QUIET


def test_a_draining_agent_whose_workers_are_done_keeps_the_store_that_the_others_use():
    done = replace(RUNS, done=frozenset({"me"}))
    now = Situation(
        job=done, node=replace(ME, draining=True), workers=Workers.SUCCEEDED, round=2, hosting=True
    )
    assert next_action(now)[0] is Action.WAIT
    assert next_action(replace(now, hosting=False))[0] is Action.EXIT
    assert next_action(replace(now, job=replace(done, state=State.DONE)))[0] is Action.EXIT
