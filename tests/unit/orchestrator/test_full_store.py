"""What an agent makes of an etcd that answers, and has no room for what is to be written."""

from __future__ import annotations

import json
from functools import partial

import pytest

from tests.support.manual_clock import ManualClock
from zero_agent.errors import AgentFailed
from zero_agent.loop.config import AgentConfig
from zero_agent.loop.limits import FULL_AGAIN_S, Limits, pause_when_full_s
from zero_agent.workers.worker_main import Program
from zero_contract.journal import Journal
from zero_orchestrator.errors import StoreFull, StoreUnavailable
from zero_orchestrator.membership.job_state import Snapshot, State
from zero_orchestrator.membership.moves import Wait
from zero_orchestrator.membership.rounds import Timing
from zero_orchestrator.membership.spec import JobSpec

GRACE_S, JOIN_S = 60.0, 600.0
SPEC = JobSpec(min_nodes=1, max_nodes=1)
FORMING = Snapshot(spec=SPEC, state=State.FORMING, n=1)


class Told:
    """An agent's limits, its clock, and what its journal was told."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.texts: list[str] = []
        journal = Journal(
            "a", publish=lambda line, kept: self.texts.append(json.loads(line)["text"])
        )
        config = AgentConfig(
            spec=SPEC,
            program=Program(target="true", is_module=False, arguments=[]),
            slots=1,
            job="job",
            node_id="a",
            address="127.0.0.1",
            timing=Timing(),
            etcd_grace_s=GRACE_S,
            join_timeout_s=JOIN_S,
        )
        self.limits = Limits(config, self.clock, journal)


def fail(error):
    raise error


def test_an_etcd_that_is_full_has_no_limit_and_one_that_does_not_answer_has_one():
    one = Told()
    for _ in range(10):
        one.limits.store_fails(StoreFull("no room"))
        one.clock.advance(GRACE_S)
    one.limits.store_fails(StoreUnavailable("no answer"))
    one.clock.advance(GRACE_S + 1)
    with pytest.raises(AgentFailed, match="--etcd-grace"):
        one.limits.store_fails(StoreUnavailable("no answer"))


def test_a_full_etcd_is_told_once_and_then_at_long_intervals_until_something_was_written():
    one = Told()
    one.limits.store_answers(fence=7)
    for _ in range(6):
        one.limits.store_fails(StoreFull("no room"))
        one.limits.store_answers(fence=7)
        one.clock.advance(FULL_AGAIN_S / 4)
    assert [text.partition(" (")[0] for text in one.texts] == ["etcd is full"] * 2
    one.limits.store_answers(fence=8)
    assert one.texts[2:] == [f"etcd has room again, after {FULL_AGAIN_S * 6 / 4:.0f} s"]


def test_no_agent_gives_a_job_up_that_waits_for_nothing_but_room_in_etcd():
    one = Told()
    refuse = partial(fail, StoreFull("no room"))
    for _ in range(5):
        one.limits.check_waiting(FORMING, "waiting for 1", Wait.NODES, refuse)
        one.clock.advance(JOIN_S + 1)
    assert "etcd is full (no room)" in one.texts[0]
    with pytest.raises(AgentFailed, match="--join-timeout"):
        one.limits.check_waiting(FORMING, "waiting for 1", Wait.NODES, lambda: None)


def test_an_outage_of_etcd_is_no_time_in_which_too_few_nodes_have_come():
    """It has a limit of its own, and after it nodes have the time that they had before it."""
    one = Told()
    silent = partial(fail, StoreUnavailable("no answer"))
    for _ in range(5):
        one.limits.check_waiting(FORMING, "waiting for 1", Wait.NODES, silent)
        one.clock.advance(JOIN_S + 1)
    one.limits.check_waiting(FORMING, "waiting for 1", Wait.NODES, silent)
    one.limits.check_waiting(FORMING, "waiting for 1", Wait.NODES)
    one.clock.advance(JOIN_S - 1)
    one.limits.check_waiting(FORMING, "waiting for 1", Wait.NODES)
    one.clock.advance(2)
    with pytest.raises(AgentFailed, match="--join-timeout"):
        one.limits.check_waiting(FORMING, "waiting for 1", Wait.NODES)


@pytest.mark.parametrize("nodes", [1, 100, 2000])
def test_all_agents_of_a_job_together_ask_a_full_etcd_no_more_than_a_few_hundred_times_a_second(
    nodes,
):
    assert all(nodes / pause_when_full_s(nodes) <= 200 for _ in range(100))
