"""Long random walks of large jobs, through the same lines as the exhaustive search.

What a search cannot reach, a walk may stumble over: many nodes, many rounds, faults upon faults.
A seed that fails is a test case.
"""

from __future__ import annotations

import pytest

from tests.model.walks import walk

WALKS = [*((8, 3_000, seed) for seed in range(6)), *((50, 8_000, seed) for seed in range(2))]
"""Nodes, events, seed. `python -m tests.model --walk 100000 --nodes 50` goes further."""


@pytest.mark.parametrize(("nodes", "events", "seed"), WALKS)
def test_whatever_happens_a_round_runs_again_once_the_faults_have_stopped(nodes, events, seed):
    assert walk(nodes, events, seed) > 5, "the walk went through many rounds"
