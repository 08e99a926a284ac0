"""How a node leaves: whose request counts, what ends the wait, and what the log says."""

from __future__ import annotations

import logging
import signal
from math import inf

import pytest

from tests.support.manual_clock import ManualClock
from zero_agent.errors import AgentFailed
from zero_agent.loop.leaving import PROMPT_S, SKEW_S, Leaving
from zero_contract.exit_codes import AgentExit
from zero_contract.journal import Journal
from zero_orchestrator.errors import StoreUnavailable
from zero_orchestrator.membership.job_state import DrainOrder

LIMIT_S = 30.0
ORDER = DrainOrder(node="a", incarnation="1", by="kim")


class Announcements:
    """A rendezvous that takes a node's announcement, unless etcd is away."""

    def __init__(self) -> None:
        self.count, self.away = 0, False

    def drain(self) -> int:
        if self.away:
            raise StoreUnavailable("etcd is away")
        self.count += 1
        return 7


class Node:
    """A node that can be asked to leave, and the lines of its log."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.rdzv, self.clock, self._log = Announcements(), ManualClock(), caplog
        caplog.set_level(logging.INFO, logger="zero")
        self.leaving = Leaving(self.rdzv, Journal("a"), self.clock, LIMIT_S)  # type: ignore[arg-type]

    @property
    def lines(self) -> list[str]:
        return [record.getMessage() for record in self._log.records]


@pytest.fixture
def node(caplog: pytest.LogCaptureFixture) -> Node:
    return Node(caplog)


def test_nobody_leaves_unasked(node: Node) -> None:
    node.leaving.obey(None)
    node.clock.advance(2 * LIMIT_S)
    node.leaving.check_limit()
    assert (node.leaving.begun, node.leaving.left_s, node.rdzv.count) == (False, inf, 0)


def test_a_request_is_announced_once_and_decides_the_exit_code(node: Node) -> None:
    for _ in range(2):
        node.leaving.obey(ORDER)
    node.leaving.signalled(signal.SIGTERM)
    assert (node.rdzv.count, node.leaving.code) == (1, AgentExit.DRAINED)
    assert node.leaving.left_s == LIMIT_S
    soon = "leaving at the next step boundary, if the workers can"
    assert node.lines == [
        f"zero-ctl drain by kim: {soon}",
        f"SIGTERM: {soon}; once more to leave at once",
    ]


def test_the_same_signal_once_more_ends_the_wait_and_another_one_does_not(node: Node) -> None:
    node.leaving.signalled(signal.SIGUSR1)
    node.leaving.signalled(signal.SIGTERM)
    assert node.leaving.code == 128 + signal.SIGUSR1
    with pytest.raises(AgentFailed, match="SIGTERM again: the workers are killed") as ended:
        node.leaving.signalled(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM


def test_workers_that_end_at_a_schedulers_signal_are_given_time_before_the_others_hear(
    node: Node,
) -> None:
    node.leaving.signalled(signal.SIGTERM)
    node.leaving.obey(None, stopping=True)
    node.clock.advance(SKEW_S)
    node.leaving.check_limit()
    assert node.rdzv.count == 0
    node.clock.advance(0.01)
    node.leaving.obey(None, stopping=True)
    assert node.rdzv.count == 1


def test_a_request_that_etcd_does_not_take_is_told_once_and_written_when_it_answers(
    node: Node,
) -> None:
    node.rdzv.away = True
    node.leaving.signalled(signal.SIGTERM)
    with pytest.raises(StoreUnavailable):
        node.leaving.obey(None)
    node.clock.advance(PROMPT_S + 0.01)
    for _ in range(2):
        node.leaving.check_limit()
    node.rdzv.away = False
    node.leaving.obey(None)
    assert node.rdzv.count == 1
    hint = "; once more to leave at once"
    assert node.lines == [
        f"SIGTERM: leaving when etcd answers, within 30 s in any case{hint}",
        f"SIGTERM: leaving at the next step boundary, if the workers can{hint}",
    ]


def test_leaving_has_a_limit(node: Node) -> None:
    node.leaving.obey(ORDER)
    node.clock.advance(LIMIT_S)
    node.leaving.check_limit()
    node.clock.advance(0.01)
    with pytest.raises(AgentFailed, match=r"within 30 s \(--shutdown-timeout\)") as ended:
        node.leaving.check_limit()
    assert ended.value.code == AgentExit.DRAINED
