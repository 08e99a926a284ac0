"""Sums that begin inside of nodes: the same bits in every grouping of the ranks into nodes."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence

import pytest
import torch

from tests.numerics.test_reduction_order import COUNT, digest, expected, make, train
from tests.support.inside import looking_often
from tests.support.traffic import traffic
from tests.support.world import GROUP_TIMEOUT_S, WorldPool
from zero_comm.errors import Diverged
from zero_comm.exchange.collectives import Collectives, wait
from zero_comm.exchange.cpu.same_host import SWITCH
from zero_comm.sums.node import NodeReduction
from zero_comm.sums.plan import plan_reduction
from zero_comm.topology import ENV_NODE_RANKS, Topology
from zero_contract.errors import PeerLost
from zero_data.global_batch import strided


def gathered(nodes: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """The rank that each shard comes from, and the rows by rank."""
    collectives = Collectives()
    collectives.lay_out(Topology(nodes=nodes))
    full = torch.zeros(4 * 3, dtype=torch.int64)
    collectives.own(full).fill_(collectives.rank)
    wait(collectives.all_gather(full, "shards"))
    rows = collectives.everybodys(torch.tensor([10 * collectives.rank]), "rows")
    return full[::3].tolist(), rows.flatten().tolist()


@pytest.mark.parametrize(
    ("nodes", "owners"), [((2, 2), [0, 2, 1, 3]), ((3, 1), [0, 1, 3, 2]), ((4,), [0, 1, 2, 3])]
)
@pytest.mark.corners(nodes=[(2, 2)])
def test_shards_lie_in_the_order_of_owners_and_rows_in_that_of_ranks(
    worlds: WorldPool, nodes: tuple[int, ...], owners: list[int]
) -> None:
    assert worlds.run(4, gathered, nodes) == [(owners, [0, 10, 20, 30])] * 4


def hashes(nodes: str, reads: str, cases: Sequence[tuple[int, str, int]]) -> list[str]:
    """The weights of each case, on these nodes; whether ranks read each other's memory."""
    os.environ.update({ENV_NODE_RANKS: nodes, SWITCH: reads})
    try:
        engines = [make(*case) for case in cases]
        for engine in engines:
            collectives = engine._core.collectives
            assert collectives.topology.nodes == tuple(map(int, nodes.split(",")))
        return [digest(train(engine)) for engine in engines]
    finally:
        del os.environ[ENV_NODE_RANKS], os.environ[SWITCH]


def test_the_weights_are_the_same_bits_in_every_grouping_of_the_ranks_into_nodes(
    worlds: WorldPool,
) -> None:
    """Four ranks, all stages, with padding micro-batches; over sockets, and by memory."""
    cases = [(0, "fp32", 8), (1, "bf16", 8), (2, "fp32", 4), (3, "bf16", 8)]
    wanted = [digest(expected(dtype, block)) for _, dtype, block in cases]
    for nodes, reads in (("2,2", "0"), ("3,1", "1")):
        assert worlds.run(4, hashes, nodes, reads, cases) == [wanted] * 4


def sent(nodes: str) -> tuple[int, int]:
    """The bytes that a rank sends for the sums of one step in bf16, and the elements."""
    os.environ[ENV_NODE_RANKS] = nodes
    try:
        engine = make(2, "bf16")
    finally:
        del os.environ[ENV_NODE_RANKS]
    train(engine, 1)
    assert engine._core.reducer is not None
    reduction = engine._core.reducer.pipeline.reduction
    assert isinstance(reduction, NodeReduction)
    return reduction.collectives.bytes_sent["pieces"], sum(u.padded for u in engine._core.units)


def test_what_travels_is_what_the_plan_says_to_the_byte(worlds: WorldPool) -> None:
    """Equal nodes, whose slices need no rounding."""
    found = worlds.run(4, sent, "2,2")
    plan = plan_reduction(strided(4).rows(COUNT), block=8, nodes=(2, 2))
    by_plan = traffic(plan, found[0][1], gradient_bytes=2)
    by_node = [sum(bytes_ for bytes_, _ in found[first : first + 2]) for first in (0, 2)]
    planned = zip(by_plan.inside_bytes, by_plan.between_bytes, strict=True)
    assert by_node == [inside + between for inside, between in planned]


def stepped_whole(nodes: str) -> str:
    """Whole parameters go to their owners, three of the ranks, and back to every rank."""
    os.environ[ENV_NODE_RANKS] = nodes
    try:
        engine = make(0, "fp32", optimizer={"type": "Adafactor", "params": {"lr": 0.01}})
    finally:
        del os.environ[ENV_NODE_RANKS]
    return digest(train(engine))


def test_parameters_that_are_stepped_whole_are_the_same_bits_in_every_grouping(
    worlds: WorldPool,
) -> None:
    """At stage 0, where every rank gets all of them: through one rank of each node."""
    (alone,) = worlds.run(1, stepped_whole, "1")
    for nodes in ("2,2", "1,3"):
        assert worlds.run(4, stepped_whole, nodes) == [alone] * 4


@looking_often()
def diverge(nodes: str) -> str:
    """What a rank is told when rank 0 waits for all at a barrier, and the others for a sum."""
    os.environ[ENV_NODE_RANKS] = nodes
    try:
        engine = make(2, "fp32")
    finally:
        del os.environ[ENV_NODE_RANKS]
    train(engine, 1)  # the first step looks for memory, in the group of all
    began = time.monotonic()
    try:
        if engine.global_rank == 0:
            engine._core.collectives.barrier("a barrier")
        train(engine)
    except Diverged as error:
        assert time.monotonic() - began < GROUP_TIMEOUT_S
        return str(error)
    except PeerLost as error:  # another rank has said it, and ended
        return f"PeerLost: {error}"
    return "trained"


def test_ranks_that_wait_for_each_other_in_two_groups_are_told_who_waits_for_what(
    worlds: WorldPool,
) -> None:
    """Sums have a group of their own."""
    told = " ".join(worlds.run(3, diverge, "2,1"))
    assert "rank 0 waits for a barrier, which rank 1 has not begun" in told
    assert "rank 1 waits for gradients of" in told
    assert "trained" not in told


GROUPINGS = ["4", "1,1,1,1", "2,2", "1,3", "3,1", "1,2,1", "2,1,1", "1,1,2"]


@pytest.mark.full
@pytest.mark.parametrize("nodes", GROUPINGS)
def test_the_weights_are_the_same_bits_in_every_case_of_every_grouping(
    worlds: WorldPool, nodes: str
) -> None:
    cases = list(itertools.product((0, 1, 2, 3), ("fp32", "bf16", "fp16"), (1, 4, 8)))
    wanted = [digest(expected(dtype, block)) for _, dtype, block in cases]
    assert worlds.run(4, hashes, nodes, "1", cases, deadline_s=300) == [wanted] * 4
