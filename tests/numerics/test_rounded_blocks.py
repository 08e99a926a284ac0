"""ZeRO++'s gradients: each block's sum is rounded to int8, and travels so between nodes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.numerics.test_accumulate import Case, make_at, on_nodes
from tests.numerics.test_reduction_order import digest, expected, train
from tests.support.queued import BACKEND
from tests.support.saving import heard
from tests.support.traffic import traffic
from tests.support.world import WorldPool
from zero_comm.sums.node import NodeReduction
from zero_comm.sums.plan import plan_reduction
from zero_comm.sums.quantization import PACKED_BYTES
from zero_comm.topology import Topology
from zero_data.global_batch import strided
from zero_engine.config import load_config
from zero_engine.core.engine import Engine
from zero_engine.layout import Facts, resolve


def make_rounded(where: str, stage: int, dtype: str, block: int | None, count: int = 13) -> Engine:
    zero = {"stage": stage, "zero_quantized_gradients": True}
    return make_at(where, stage, dtype, block, zero_optimization=zero, train_batch_size=count)


def hashes(nodes: str, cases: Sequence[Case]) -> list[str]:
    """The weights of each case, on these nodes."""
    engines = on_nodes(nodes, lambda: [make_rounded(*case) for case in cases])
    return [digest(train(engine)) for engine in engines]


def wanted(cases: Sequence[Case]) -> list[str]:
    return [digest(expected(dtype, block, rounds=True)) for _, _, dtype, block in cases]


PLACES: list[tuple[str, list[Case]]] = [
    ("1", [("owner", 0, "bf16", 8), ("local", 1, "fp32", 4)]),
    ("2", [("owner", 3, "bf16", 8)]),
    ("1,1", [("owner", 0, "fp32", 1), ("local", 1, "bf16", 4)]),
    ("2,1", [("owner", 2, "bf16", 1), ("node", 3, "fp32", 4)]),
    ("2,2", [("owner", 3, "bf16", 2), ("node", 0, "bf16", 8), ("owner", 1, "fp32", 8)]),
]


def test_the_weights_are_those_of_rounded_blocks_wherever_blocks_lie(worlds: WorldPool) -> None:
    """Blocks in one rank, in one node, over several nodes; uneven nodes, whose slices are cut
    between values that are rounded together; a short last step."""
    for nodes, cases in PLACES:
        world = sum(map(int, nodes.split(",")))
        assert worlds.run(world, hashes, nodes, cases) == [wanted(cases)] * world


GROUPINGS = ["1", "2", "1,1", "3", "1,2", "1,1,1", "4", "1,1,1,1", "2,2", "1,3", "3,1", "1,2,1"]


@pytest.mark.full
@pytest.mark.parametrize("nodes", GROUPINGS)
def test_the_weights_are_those_of_rounded_blocks_in_every_case(
    worlds: WorldPool, nodes: str
) -> None:
    places = [
        *itertools.product(("owner", "node"), range(4)),
        *itertools.product(("local",), range(2)),
    ]
    cases = [
        (where, stage, dtype, block)
        for where, stage in places
        for dtype, block in itertools.product(("fp32", "bf16"), (1, 2, 8))
    ]
    world = sum(map(int, nodes.split(",")))
    assert worlds.run(world, hashes, nodes, cases, deadline_s=300) == [wanted(cases)] * world


@pytest.mark.full
def test_the_weights_are_those_of_rounded_blocks_by_the_rules_of_nccl(worlds: WorldPool) -> None:
    for nodes, cases in PLACES[2:]:
        world = sum(map(int, nodes.split(",")))
        found = worlds.run(world, hashes, nodes, cases, backend=BACKEND)
        assert found == [wanted(cases)] * world


def sent(nodes: str, block: int) -> tuple[int, int]:
    """The bytes that a rank sends for the sums of one step in fp32, and the elements."""
    (engine,) = on_nodes(nodes, lambda: [make_rounded("owner", 2, "fp32", block, count=12)])
    train(engine, 1)
    assert engine._core.reducer is not None
    reduction = engine._core.reducer.pipeline.reduction
    assert isinstance(reduction, NodeReduction)
    return reduction.collectives.bytes_sent["pieces"], sum(u.padded for u in engine._core.units)


@pytest.mark.parametrize(("nodes", "block"), [((2, 2), 2), ((1, 1), 1)])
def test_between_nodes_a_quarter_of_the_bytes_travels_where_blocks_lie_in_one_node(
    worlds: WorldPool, nodes: tuple[int, ...], block: int
) -> None:
    """To the byte of the plan; inside of a node gradients travel in fp32."""
    world = sum(nodes)
    found = worlds.run(world, sent, ",".join(map(str, nodes)), block)
    plan = plan_reduction(strided(world).rows(12), block=block, nodes=nodes)
    elements = found[0][1]
    rounded, exact = (traffic(plan, elements, 4, size) for size in (PACKED_BYTES, None))
    assert [256 * each for each in rounded.between_bytes] == [65 * b for b in exact.between_bytes]
    size = nodes[0]
    by_node = [sum(each for each, _ in found[at : at + size]) for at in range(0, world, size)]
    planned = zip(rounded.inside_bytes, rounded.between_bytes, strict=True)
    assert by_node == [inside + between for inside, between in planned]


def save(root: str) -> None:
    (engine,) = on_nodes("1,1", lambda: [make_rounded("node", 1, "fp32", 4)])
    train(engine, 1)
    engine.save_checkpoint(root)


def resume(root: str) -> str:
    engine = make_rounded("owner", 2, "fp32", 4)
    engine.load_checkpoint(root)
    return digest(train(engine))


def test_a_run_that_rounds_blocks_is_resumed_on_other_nodes_with_the_same_bits(
    worlds: WorldPool, tmp_path: Path
) -> None:
    worlds.run(2, save, str(tmp_path))
    assert worlds.run(1, resume, str(tmp_path)) == [digest(expected("fp32", 4, rounds=True))]


@pytest.mark.parametrize(
    ("nodes", "block", "where", "said"),
    [
        ((4, 4), 8, "owner", "spread over nodes of 4 ranks, so sums travel between them in fp32"),
        ((4, 4), 8, "owner", "set elastic.reduction_block to 4 in a new run"),
        ((12, 6), 8, "owner", "set elastic.reduction_block to 2 in a new run"),
        ((8, 16), 8, "owner", ""),
        ((1, 1), 1, "owner", ""),
        ((4,), 8, "owner", ""),
        ((4, 4), 8, "node", ""),
    ],
)
def test_a_block_that_is_spread_over_nodes_is_reported_with_the_key_to_set(
    nodes: tuple[int, ...], block: int, where: str, said: str
) -> None:
    config = load_config(
        {
            "elastic": {"reduction_block": block, "accumulate": where},
            "zero_optimization": {"zero_quantized_gradients": True},
        }
    )
    told = resolve(config, Facts(topology=Topology(nodes=nodes))).sums.spread
    assert said in told
    assert bool(told) == bool(said)


def warned(nodes: str, block: int) -> list[str]:
    """What two steps warn of, in a run whose config names no block and whose checkpoint has one."""
    (engine,) = on_nodes(nodes, lambda: [make_rounded("owner", 1, "fp32", None)])
    assert engine._core.zero is not None
    engine._core.zero.reduction_block = block
    with heard() as lines:
        train(engine)
    return [line for line in lines if "spread over nodes" in line]


def test_it_is_reported_once_for_the_block_of_the_run(worlds: WorldPool) -> None:
    (first, *others) = worlds.run(2, warned, "1,1", 2)
    assert (len(first), others) == (1, [[]])
    assert worlds.run(2, warned, "1,1", 1) == [[], []]
