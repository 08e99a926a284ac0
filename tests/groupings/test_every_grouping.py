"""One result in every grouping of 1 to 8 ranks into nodes, and the bytes kept that the plan says.

`make test-groupings` runs it alone.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from tests.numerics.test_accumulate import (
    check_kept,
    kept_in_step,
    losses,
    make_at,
    planned,
)
from tests.numerics.test_reduction_order import BLOCKS, COUNT, DTYPES, digest, expected, train
from tests.support.world import WorldPool
from zero_comm.exchange.cpu.same_host import SWITCH
from zero_comm.sums.plan import Where
from zero_comm.topology import ENV_NODE_RANKS

LARGEST_WORLD = 8
_OF_A_PART = 32
"""Groupings of one test; each world above it has several tests, so that no test is long."""

Nodes = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training."""

    where: Where
    stage: int
    dtype: str
    block: int
    reads: str
    """Whether ranks read each other's memory."""


Result = tuple[str, str, float, int, list[int]]
"""Where sums were formed, the weights, the mean loss, and of the first step the elements of all
gradients and the bytes that the rank kept after each micro-step."""


def groupings(world: int) -> list[Nodes]:
    """Every way to divide the ranks, in their order, into nodes."""
    ends = (
        (*inner, world)
        for count in range(world)
        for inner in itertools.combinations(range(1, world), count)
    )
    return [
        tuple(stop - start for start, stop in itertools.pairwise((0, *stops))) for stops in ends
    ]


EVERY = [nodes for world in range(1, LARGEST_WORLD + 1) for nodes in groupings(world)]


def cases_of(nodes: Nodes) -> list[Case]:
    """Of one grouping: each stage once, and each mode and dtype.

    Which of them meet, and the block, changes from one grouping to the next, so that all
    combinations occur. "local" exists at stages 0 and 1 alone.
    """
    number, dtypes = EVERY.index(nodes), list(DTYPES)
    other = Where.NODE if number & 1 else Where.OWNER
    smaller = [Where.LOCAL, other] if number & 2 else [other, Where.LOCAL]
    larger = [Where.NODE, Where.OWNER] if number & 4 else [Where.OWNER, Where.NODE]
    return [
        Case(
            where=where,
            stage=stage,
            dtype=dtypes[(number + stage) % len(dtypes)],
            block=BLOCKS[(number // 3 + stage) % len(BLOCKS)],
            reads=str((number + stage) // 2 % 2),
        )
        for stage, where in enumerate((*smaller, *larger))
    ]


def acts(case: Case, nodes: Nodes) -> Where:
    """Where sums are formed, if the mode has nothing to save there."""
    one_node = len(nodes) == 1
    idle = sum(nodes) == 1 or (case.where is Where.NODE and one_node)
    return Where.OWNER if idle else case.where


# ---- on the ranks ----


def results(nodes: Nodes, cases: Sequence[Case]) -> list[Result]:
    """Train every case on these nodes."""
    os.environ[ENV_NODE_RANKS] = ",".join(map(str, nodes))
    try:
        return [result(case) for case in cases]
    finally:
        del os.environ[ENV_NODE_RANKS], os.environ[SWITCH]


def result(case: Case) -> Result:
    os.environ[SWITCH] = case.reads
    engine = make_at(case.where.value, case.stage, case.dtype, case.block)
    kept = kept_in_step(engine)
    weights = digest(train(engine))
    elements = sum(unit.padded for unit in engine._core.units)
    return engine._core.layout.sums.where.value, weights, engine.mean_loss, elements, kept


# ---- what is right ----


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, int], tuple[str, float]]:
    """Of each dtype and block, the weights by plain torch and the mean loss of one rank."""
    pairs = list(itertools.product(DTYPES, BLOCKS))
    pool = WorldPool(1)
    try:
        (means,) = pool.run(1, losses, pairs)
    finally:
        pool.close()
    return {pair: (digest(expected(*pair)), mean) for pair, mean in zip(pairs, means, strict=True)}


# ---- the tests ----


def parts() -> Iterator[tuple[int, int]]:
    """World and first grouping of each test."""
    for world in range(1, LARGEST_WORLD + 1):
        for first in range(0, 1 << (world - 1), _OF_A_PART):
            yield world, first


@pytest.mark.full
@pytest.mark.parametrize(("world", "first"), list(parts()))
def test_every_grouping_into_nodes_has_the_bits_of_one_rank_and_keeps_what_the_plan_says(
    alone: dict[tuple[str, int], tuple[str, float]], world: int, first: int
) -> None:
    """In every stage, mode and dtype, with padding micro-batches and a short last step."""
    pool = WorldPool(world)
    try:
        for nodes in groupings(world)[first : first + _OF_A_PART]:
            cases = cases_of(nodes)
            by_rank = pool.run(world, results, nodes, cases)
            for case, of_ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
                where, right = acts(case, nodes), alone[case.dtype, case.block]
                plan = planned(where, nodes, case.block)
                for rank, (acted, *bits, elements, kept) in enumerate(of_ranks):
                    assert (acted, *bits) == (where.value, *right), (nodes, rank, case)
                    check_kept(plan, case.dtype, rank, elements, kept)
    finally:
        pool.close()


def test_the_cases_hold_all_pairs_of_a_grouping_with_a_stage_mode_and_dtype() -> None:
    """And all combinations of these and a block at the larger world sizes."""
    assert len(set(EVERY)) == 255
    for nodes in EVERY:
        cases = cases_of(nodes)
        assert {case.stage for case in cases} == {0, 1, 2, 3}
        assert {case.where for case in cases} == set(Where)
        assert {case.dtype for case in cases} == set(DTYPES)
        assert COUNT % sum(nodes) or sum(nodes) == 1
    places = {(stage, where) for stage in range(4) for where in Where}
    places -= {(2, Where.LOCAL), (3, Where.LOCAL)}
    combinations = {
        (*place, *more) for place in places for more in itertools.product(DTYPES, BLOCKS)
    }
    for world in (7, 8):
        every = [case for nodes in groupings(world) for case in cases_of(nodes)]
        assert {(c.stage, c.where, c.dtype, c.block) for c in every} == combinations
