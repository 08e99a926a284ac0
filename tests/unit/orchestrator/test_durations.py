"""What an agent measures of its job: the wait of a later growth is what the last one has cost."""

from dataclasses import replace

from tests.support.manual_clock import ManualClock
from tests.unit.orchestrator.test_rounds import TIMING, active, forming
from zero_orchestrator.membership.durations import Durations
from zero_orchestrator.membership.moves import Move
from zero_orchestrator.membership.rounds import decide


def grown(clock: ManualClock) -> Durations:
    """Round 1 of a, b is left for c; 20 s later round 2 begins, and 5 s later it has stepped."""
    durations = Durations(clock)
    durations.look(active("ab"))
    durations.look(replace(active("ab", "abc"), yielding="c joins"))
    clock.advance(20)
    durations.look(replace(active("abc"), n=2))
    clock.advance(5)
    durations.stepped(2, ago_s=0)
    return durations


def test_a_growth_has_cost_what_passed_until_the_first_step_after_it():
    clock = ManualClock()
    durations = grown(clock)
    assert durations.observed().reform_s == 25
    job = replace(active("abc", "abcd"), n=2)
    durations.look(job)
    clock.advance(60)
    reason = "d will join when round 2 has run for 75 s: a re-forming takes 3 nodes 25.0 s"
    decision = decide(job, durations.observed(), TIMING)
    assert (decision.transition, decision.reason) == (None, f"{reason} (--grow-every)")


def test_a_node_that_is_back_after_a_failure_joins_at_once_whatever_an_earlier_growth_has_cost():
    """So it did where an agent decided that had measured nothing: the node's own, for example."""
    clock = ManualClock()
    durations, job = grown(clock), replace(active("ab", "abc"), n=3)
    durations.look(job)
    clock.advance(TIMING.grow_after_s)
    transition = decide(job, durations.observed(), TIMING).transition
    assert transition is not None
    assert (transition.move, transition.cause) == (Move.YIELD, "c joins")


def test_a_wait_for_nodes_after_some_have_left_is_no_cost_of_re_forming():
    clock = ManualClock()
    durations = Durations(clock)
    left = {"n": 1, "yielding": "b is leaving"}
    durations.look(replace(active("ab"), **left))
    clock.advance(3)
    durations.look(replace(forming("a", former="ab", quiet="ab", low=2), **left))
    clock.advance(600)
    durations.look(replace(forming("a", former="ab", quiet="ab", low=2), **left))
    durations.look(replace(forming("ac", former="ab", quiet="ab", low=2), **left))
    clock.advance(1)
    assert durations.left_s(1) == 1
