"""From when to when something was wrong with a job, as its events and records tell."""

import dataclasses

import pytest

from tests.support.pictured import disturbed
from zero_orchestrator.ctl.page.problems import problems
from zero_orchestrator.membership.job_state import State
from zero_orchestrator.observe.events import Event
from zero_orchestrator.observe.history import Failing, Point
from zero_orchestrator.observe.status import JobStatus
from zero_orchestrator.observe.verdicts import Kind, Verdict

RUNS = JobStatus(job="gpt", state=State.ACTIVE, now="")


def told(at_s: float, event: str, node: str = "a", **facts) -> Event:
    record = {"time": at_s, "node": node, "round": 1, "event": event, "text": "", **facts}
    return Event(1, record)


def found(events, status: JobStatus = RUNS, points=(), now_s: float = 99.0):
    return [
        (one.kind, "".join(one.nodes), one.from_s, one.to_s)
        for one in problems(events, status, points, now_s)
    ]


def test_a_verdict_holds_until_it_is_withdrawn_or_its_round_ends():
    events = [
        told(10.0, "straggler", rank=3, host="b", slow=True),
        told(11.0, "straggler", rank=5, host="c", slow=True),
        told(12.0, "straggler", rank=3, host="b", slow=False),
        told(12.5, "slow storage", rank=7, host="d", slow=True),
        told(12.8, "slow storage", slow=False),
        told(13.0, "interrupt"),
        told(14.0, "straggler", rank=3, host="b", slow=True),
        told(15.0, "stuck", ranks=[3, 7], hosts=["b", "d"], step=9, stuck=True),
        told(16.0, "interrupt"),
        told(17.0, "slow link", source="b", target="c", host="", slow=True),
    ]
    assert found(events) == [
        ("straggler", "b", 10, 12),
        ("straggler", "c", 11, 13),
        ("slow storage", "d", 12.5, 12.8),
        ("straggler", "b", 14, 16),
        ("stuck", "bd", 15, 16),
        ("slow link", "", 17, None),
    ]


def test_no_problem_ends_before_it_begins_whatever_the_clocks_of_the_nodes_show():
    events = [
        told(50.0, "straggler", rank=3, host="b", slow=True),
        told(40.0, "interrupt", node="c"),
        told(60.0, "stuck", hosts=["b"], stuck=True),
        told(45.0, "finish", node="c"),
    ]
    ended = dataclasses.replace(RUNS, state=State.DONE)
    assert found(events, ended, now_s=46.0) == [("straggler", "b", 50, 50), ("stuck", "b", 60, 60)]


def test_a_job_that_takes_no_step_has_taken_none_since_its_last_one():
    points = [Point(step=n, time_s=float(n), samples=0, workers=2) for n in range(1, 10)]
    events = [
        told(40.0, "dead link", hosts=["a", "b"], step=9, stuck=True),
        told(60.0, "dead link", step=9, stuck=False),
    ]
    assert found(events, points=points) == [("dead link", "ab", 9, 60)]


def test_saves_that_fail_are_one_problem_with_what_is_known_last():
    events = [
        told(10.0, "save", step=50, failed=True, saves=1),
        told(20.0, "save", step=70, failed=True, saves=3),
        told(30.0, "interrupt"),
    ]
    failing = Failing(
        saves=3, step=70, problem="disk full", time_s=40.0, waits_for="room", left_s=3000.0
    )
    status = dataclasses.replace(RUNS, failing_saves=failing)
    (problem,) = problems(events, status, (), 100.0)
    assert (problem.kind, problem.from_s, problem.to_s) == ("saves fail", 10, None)
    assert problem.text == "the last 3 failed: disk full; waiting for room, 49 min left"
    events.append(told(50.0, "save", step=70, failed=False, saves=0))
    assert found(events) == [("saves fail", "", 10, 50)]


@pytest.mark.parametrize("back", ["store", "activate", "interrupt", "finish"])
def test_etcd_is_away_until_an_agent_reaches_it_again(back):
    """A transition is a transaction of etcd, whatever the agents that missed it could still say."""
    events = [
        told(10.0, "store", node="a", away=True),
        told(11.0, "store", node="b", away=True),
        told(20.0, back, node="a", **({"away": False} if back == "store" else {})),
        told(21.0, "store", node="b", away=False),
    ]
    assert found(events) == [("etcd away", "ab", 10, 20)]


def test_agents_that_tell_of_an_outage_one_after_the_other_tell_of_one():
    events = [
        told(10.0, "store", node="a", away=True),
        told(20.0, "store", node="a", away=False, after_s=10.0),
        told(9.0, "store", node="b", away=True),
        told(21.0, "store", node="b", away=False, after_s=12.0),
        told(30.0, "store", node="b", away=True),
    ]
    assert found(events) == [("etcd away", "ab", 9, 20), ("etcd away", "b", 30, None)]


def test_a_long_outage_is_known_from_its_end_alone():
    """What is told while etcd is away waits for it, but not for long."""
    events = [
        told(50.0, "store", node="b", away=False, after_s=40.0),
        told(51.0, "store", node="a", away=False, after_s=42.0),
        told(90.0, "store", node="a", away=False, after_s=20.0),
    ]
    assert found(events) == [("etcd away", "ba", 9, 50), ("etcd away", "a", 70, 90)]


def test_a_node_that_is_set_aside_is_a_problem_until_it_takes_part_again():
    events = [
        told(10.0, "aside", node="a", others=["b"], aside=True),
        told(20.0, "interrupt"),
        told(30.0, "aside", node="a", aside=False),
    ]
    assert found(events) == [("set aside", "a", 10, 30)]


def test_nothing_is_wrong_with_a_job_after_its_end():
    events = [told(10.0, "save", step=5, failed=True, saves=1), told(12.0, "fail")]
    ended = dataclasses.replace(RUNS, state=State.FAILED)
    assert found(events, ended, now_s=12.0) == [("saves fail", "", 10, 12)]


def test_a_verdict_that_holds_is_shown_though_its_event_is_not_kept():
    records = disturbed()
    text = records.events[-1].record["text"]
    held = (
        Verdict(kind=Kind.STRAGGLER, text=text, rank=2, node="node-c", since_step=67),
        Verdict(kind=Kind.SLOW_STORAGE, text="all ranks write slowly", since_step=50),
    )
    status = dataclasses.replace(records.status, verdicts=held)
    points = records.history.points
    at_s = next(point.time_s for point in points if point.step == 50)
    since_s = records.events[-1].record["time"]
    assert found(records.events, status, points) == [
        ("straggler", "node-c", since_s, None),
        ("slow storage", "", at_s, None),
    ]
    ended = dataclasses.replace(status, state=State.DONE)
    assert found(records.events, ended, points, since_s) == [
        ("straggler", "node-c", since_s, since_s)
    ]
