"""Exhaustive search of small jobs with a policy: exclusions, refills, giving up, node units."""

from __future__ import annotations

import pytest

from tests.model import world as model
from tests.model.search import explore, running
from tests.model.world import KEYS, begin
from zero_orchestrator.membership import rounds
from zero_orchestrator.membership.spec import JobSpec

POLICIES = {
    "an excluded node and another": (2, 1, 0, {"max_nodes": 2, "exclude_after": 1}),
    "the only node is never excluded": (1, 2, 0, {"max_nodes": 1, "exclude_after": 1}),
    "restarts that come back": (1, 2, 2, {"max_nodes": 1, "refill_after_steps": 1}),
    "giving up": (1, 2, 1, {"max_nodes": 1, "max_restarts_without_progress": 1}),
    "units of two": (2, 1, 0, {"max_nodes": 3, "node_unit": 2}),
}
"""Nodes there are, faults that happen, checkpoints that are published, the policy."""


@pytest.mark.parametrize(("nodes", "faults", "commits", "policy"), POLICIES.values(), ids=POLICIES)
def test_no_order_of_events_breaks_an_invariant_of_a_policy(nodes, faults, commits, policy):
    spec = JobSpec(**{"min_nodes": 1, "max_restarts": 1, **policy})
    assert explore(running(begin(spec, nodes, faults, commits=commits)), max_round=2) > 100


def test_no_order_of_events_breaks_an_invariant_when_a_spare_is_there():
    spec = JobSpec(min_nodes=1, max_nodes=1, max_restarts=1, exclude_after=1)
    assert explore(begin(spec, 2, faults=1), max_round=1) > 500


def test_the_search_notices_a_restart_that_came_back_unseen(monkeypatch):
    def careless(keys, job, move):
        compares, writes = rounds.transaction(keys, job, move)
        return [compare for compare in compares if compare.key != KEYS.latest], writes

    monkeypatch.setattr(model, "transaction", careless)
    spec = JobSpec(min_nodes=1, max_nodes=1, max_restarts=1, refill_after_steps=1)
    with pytest.raises(AssertionError, match="I5"):
        explore(running(begin(spec, 1, faults=2, commits=2)), max_round=2)


def test_the_search_notices_a_round_with_an_excluded_node(monkeypatch):
    def careless(keys, job, move):
        compares, writes = rounds.transaction(keys, job, move)
        return [compare for compare in compares if compare.key != keys.round], writes

    monkeypatch.setattr(model, "transaction", careless)
    spec = JobSpec(min_nodes=1, max_nodes=2, max_restarts=1, exclude_after=1)
    with pytest.raises(AssertionError, match=r"I\d+"):
        explore(running(begin(spec, 2, faults=1)), max_round=2)
