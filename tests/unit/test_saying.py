"""What an agent's log is told while the job waits, and what helps when it has waited too long."""

from __future__ import annotations

import pytest

from tests.support.manual_clock import ManualClock
from zero_agent.loop.limits import remedy
from zero_agent.loop.saying import AGAIN_S, Sayings


def test_a_drain_of_many_nodes_is_one_waiting_line_and_not_one_for_each_that_stops():
    sayings = Sayings(ManualClock())
    names = "abcdef"
    told = [f"a is leaving; waiting for {', '.join(names[i:])} to stop" for i in range(5)]
    told += [f"waiting for the workers of {', '.join(names[i:])} to stop" for i in range(5)]
    told += ["round 2 begins with 5 of 1:6 nodes", "round 2 runs on 5 nodes"]
    assert [line for line in told if sayings.is_news(line)] == [told[0], *told[-2:]]


def test_a_wait_that_is_long_is_told_again_with_those_that_are_left():
    clock = ManualClock()
    sayings = Sayings(clock)
    assert sayings.is_news("waiting for the workers of a, b to stop")
    assert not sayings.is_news("waiting for the workers of b to stop")
    clock.advance(AGAIN_S + 1)
    assert sayings.is_news("waiting for the workers of b to stop")
    clock.advance(AGAIN_S + 1)
    assert not sayings.is_news("waiting for the workers of b to stop"), "nothing has changed"
    assert sayings.is_news("round 2 runs on 1 node")
    assert sayings.is_news("waiting for the workers of b to stop"), "it is another wait"


@pytest.mark.parametrize(
    ("reason", "helps"),
    [
        ("waiting for the workers of a to stop", "`zero-ctl drain NODE`"),
        ("a is leaving; waiting for a to stop", "`zero-ctl drain NODE`"),
        ("0 of 1:1 nodes are here; waiting for 1; a is unhealthy: no disk", "Repair those nodes"),
        ("1 of 2:4 nodes are here; waiting for 1", "Start more agents"),
    ],
)
def test_the_remedy_fits_what_is_waited_for(reason, helps):
    assert helps in remedy(reason)
