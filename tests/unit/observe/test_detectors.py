"""Every kind of verdict is told once, with the fields that its event has, and withdrawn once."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from itertools import permutations

import pytest

from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from zero_agent.loop.observed.judging import DETECTORS, Verdicts, ask_through
from zero_contract.journal import EVENTS, Journal
from zero_contract.worker import RankTimes
from zero_orchestrator.membership.job_state import Members, Node, Snapshot
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.observe.detectors.detector import (
    Evidence,
    Idle,
    Probed,
    Question,
    Strains,
)
from zero_orchestrator.observe.detectors.straggler import SlowRanks
from zero_orchestrator.observe.events import Publisher
from zero_orchestrator.observe.links import Link
from zero_orchestrator.observe.verdicts import Kind

NODES = tuple(Node(id=name, incarnation="1", address=name, slots=1) for name in "abc")
MEMBERS = Members(NODES)
MB = 1e6


def times(step, computes_s, *, writes=(), slow=None):
    """The times of three ranks after so many steps, in each of which they computed for so long."""
    longest = max(computes_s)
    return RankTimes(
        step=step,
        steps=step,
        compute_s=tuple(step * own_s for own_s in computes_s),
        wait_s=tuple(step * (longest - own_s + 0.1) for own_s in computes_s),
        slow_steps=tuple(step if rank == slow else 0 for rank in range(3)),
        write_bytes_per_s=tuple(rate * MB for rate in writes),
        write_s=tuple(1000 / rate for rate in writes),
    )


def links(**rates):
    """A probe: each link has 1000 MB/s, or as many as are named."""
    ways = permutations("abc", 2)
    return Probed(
        links=[
            Link(
                source=source,
                target=target,
                latency_s=0.0002,
                bytes_per_s=rates.get(source + target, 1000) * MB,
            )
            for source, target in ways
        ]
    )


def straggler():
    yield from (times(10 * window, (1.0, 1.0, 3.0), slow=2) for window in range(8))
    yield Strains(by_node={"c": {"throttled": 0.5}})
    begin = times(70, (1.0, 1.0, 3.0), slow=2)
    for step in range(80, 160, 10):
        own_s = tuple(before + (step - 70) for before in begin.compute_s)
        wait_s = tuple(before + 0.1 * (step - 70) for before in begin.wait_s)
        slow_steps = begin.slow_steps
        yield RankTimes(
            step=step, steps=step, compute_s=own_s, wait_s=wait_s, slow_steps=slow_steps
        )


def slow_storage():
    rates = [(200, 210, 190), (202, 20, 192), (201, 21, 191), (204, 211, 193)]
    yield from (times(step, (1.0, 1.0, 1.0), writes=of) for step, of in enumerate(rates, 1))


def slow_link():
    yield times(1, (1.0, 1.0, 1.0))
    yield from [links(ca=5, cb=6)] * 3
    yield links()


def stuck():
    yield Idle(step=7, idle_s=16.0)
    yield Evidence(
        stacks={
            "a": {"ranks": [{"rank": 0, "pid": 1, "wait": {"awaits": "sum"}, "text": ""}]},
            "b": {"ranks": [{"rank": 1, "pid": 2, "wait": {"awaits": "sum"}, "text": ""}]},
        }
    )
    yield Idle(step=8, idle_s=None)


def dead_link():
    yield Idle(step=7, idle_s=16.0, warming_up=True)
    yield Evidence(dead={frozenset("ab"): "b does not answer"})
    yield Idle(step=8, idle_s=None)


CASES = {
    Kind.STRAGGLER: (straggler, {"rank": 2, "host": "c"}),
    Kind.SLOW_STORAGE: (slow_storage, {"rank": 1, "host": "b"}),
    Kind.SLOW_LINK: (slow_link, {"source": "c", "target": "a", "host": "c"}),
    Kind.STUCK: (stuck, {"ranks": [2], "hosts": ["c"]}),
    Kind.DEAD_LINK: (dead_link, {"hosts": ["a", "b"]}),
}


def told_of(reports):
    """The events of some reports; a question that is asked in between has no answer."""
    told, over = [], threading.Event()
    publisher = Publisher(MemoryStore(ManualClock()), "gpt", "a", "1", ManualClock())
    journal = Journal("a", publish=lambda line, kept: told.append(json.loads(line)))

    def ask(question, nodes):
        over.wait(60)
        return Strains(by_node={})

    one = Verdicts(publisher, journal, ManualClock(), lambda handler: handler, ask)
    job = Snapshot(JobSpec(min_nodes=3, max_nodes=3), n=1, members=MEMBERS)
    one.follow(job, 1)
    for report in reports:
        one.add(report)
    one.follow(replace(job, n=2), 1)  # whoever answers now is not heard
    over.set()
    publisher.close()
    return told


def test_there_is_a_case_of_every_kind():
    assert CASES.keys() == set(Kind)


@pytest.mark.parametrize("kind", Kind)
def test_a_verdict_is_told_with_its_cause_and_withdrawn_when_it_no_longer_holds(kind):
    reports, about = CASES[kind]
    begin, end = told_of(reports())
    assert {begin["event"], end["event"]} == {kind}
    assert (begin[kind.flag], end[kind.flag]) == (True, False)
    assert {name: begin[name] for name in about} == about
    common = {"time", "node", "round", "event", "text"}
    assert (begin | end).keys() - common == set(EVENTS[kind].facts)
    assert end["text"].endswith(f" step {end['step']}")


def test_no_report_disturbs_a_detector_that_does_not_know_it():
    """Whatever the order of reports, answers that were not asked for as well."""
    reports = [report for make, _ in CASES.values() for report in make()]
    for make in DETECTORS:
        detector = make(MEMBERS)
        for now_s, report in enumerate(reports[::-1] + reports):
            for finding in detector.add(report, float(now_s)):
                assert finding.key[0] in Kind
            assert detector.asks in {None, *Question}


class Broken(SlowRanks):
    """Finds something, then has a defect."""

    def add(self, report, now_s):
        if isinstance(report, Idle):
            raise KeyError("defect")
        return super().add(report, now_s)


def test_a_defect_of_one_detector_is_logged_once_and_ends_neither_agent_nor_others(
    monkeypatch, caplog
):
    monkeypatch.setattr("zero_agent.loop.observed.judging.DETECTORS", (Broken, *DETECTORS[1:]))
    begin, end = told_of([Idle(step=1, idle_s=1.0), *stuck()])
    assert {begin["event"], end["event"]} == {Kind.STUCK}
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError]


class Damaged(MemoryStore):
    def range(self, prefix, *, limit=0):
        raise KeyError(prefix)


@pytest.mark.parametrize("question", Question)
def test_a_question_that_fails_has_the_empty_answer_and_can_be_asked_again(question, caplog):
    report = ask_through(Damaged(ManualClock()), "gpt", question, ["a", "b"])
    assert report in (Strains(by_node={}), Probed(links=()), Evidence())
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError]
