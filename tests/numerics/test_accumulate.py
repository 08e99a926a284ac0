"""Where the sums of several micro-steps are formed changes no bit: at owners, nodes, or ranks."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_deepspeed
from tests.numerics.test_reduction_order import (
    COUNT,
    RATE,
    WIDTHS,
    Product,
    Samples,
    digest,
    expected,
    make,
    numbers,
    train,
)
from tests.support.traffic import traffic
from tests.support.world import WorldError, WorldPool
from zero_comm.exchange.cpu.same_host import SWITCH
from zero_comm.sums.node import NodeReduction
from zero_comm.sums.plan import SUM_BYTES, Plan, Where, plan_reduction
from zero_comm.topology import ENV_NODE_RANKS, Topology
from zero_contract.errors import ConfigError, ZeroError
from zero_contract.kernel import available_bytes
from zero_data.global_batch import contiguous, node_turns, strided
from zero_deepspeed.utils import safe_get_full_grad, safe_set_full_grad
from zero_engine.config import load_config
from zero_engine.core.engine import Engine
from zero_engine.memory_check import HostMemory, compare, device_budget
from zero_engine.observe.memory import estimate
from zero_step.gradients.accumulation import Accumulation

Case = tuple[str, int, str, int]
"""Where, stage, dtype and block."""


def make_at(
    where: str, stage: int, dtype: str, block: int | None, budget: int | None = None, **more: Any
) -> Engine:
    elastic = {"shuffle": False, "reduction_block": block, "accumulate": where}
    engine = make(stage, dtype, elastic=elastic, **more)
    assert engine._core.zero is not None
    engine._core.zero.spill.budget_bytes = budget  # as where a GPU has no more room
    return engine


def on_nodes(nodes: str, engines: Callable[[], list[Engine]], reads: str = "1") -> list[Engine]:
    os.environ.update({ENV_NODE_RANKS: nodes, SWITCH: reads})
    try:
        return engines()
    finally:
        del os.environ[ENV_NODE_RANKS], os.environ[SWITCH]


def hashes(nodes: str, reads: str, cases: Sequence[Case]) -> list[tuple[str, float]]:
    """The weights and the last mean loss of each case, on these nodes."""
    engines = on_nodes(nodes, lambda: [make_at(*case) for case in cases], reads)
    for engine, (where, *_) in zip(engines, cases, strict=True):
        assert engine._core.layout.sums.where == where
    return [(digest(train(engine)), engine.mean_loss) for engine in engines]


def losses(cases: Sequence[tuple[str, int]]) -> list[float]:
    """The mean losses of each case on one rank."""
    found = []
    for dtype, block in cases:
        engine = make(1, dtype, block)
        train(engine)
        found.append(engine.mean_loss)
    return found


def wanted(worlds: WorldPool, cases: Sequence[Case]) -> list[tuple[str, float]]:
    pairs = list(dict.fromkeys((dtype, block) for _, _, dtype, block in cases))
    (means,) = worlds.run(1, losses, pairs)
    right = {pair: (digest(expected(*pair)), mean) for pair, mean in zip(pairs, means, strict=True)}
    return [right[dtype, block] for _, _, dtype, block in cases]


@pytest.mark.parametrize(
    ("nodes", "reads"), [("3,1", "1"), pytest.param("2,2", "0", marks=pytest.mark.full)]
)
def test_the_bits_are_the_same_wherever_sums_are_formed(
    worlds: WorldPool, nodes: str, reads: str
) -> None:
    """Four ranks, a short last step, padding micro-batches; over sockets, and by memory."""
    cases = [
        ("node", 0, "fp32", 8),
        ("node", 1, "bf16", 4),
        ("node", 2, "bf16", 8),
        ("node", 3, "fp32", 4),
        ("local", 0, "bf16", 4),
        ("local", 1, "fp32", 8),
    ]
    right = wanted(worlds, cases)
    assert worlds.run(4, hashes, nodes, reads, cases) == [right] * 4


GROUPINGS = ["1,1,1,1", "2,2", "1,3", "3,1", "1,2,1", "2,1,1", "1,1,2"]


@pytest.mark.full
@pytest.mark.parametrize("nodes", [*GROUPINGS, "4"])
def test_the_bits_are_the_same_in_every_case_of_every_grouping(
    worlds: WorldPool, nodes: str
) -> None:
    stages = {"local": (0, 1)} if nodes == "4" else {"node": (0, 1, 2, 3), "local": (0, 1)}
    cases = [
        (where, stage, dtype, block)
        for where in stages
        for stage in stages[where]
        for dtype, block in itertools.product(("fp32", "bf16", "fp16"), (1, 4, 8))
    ]
    right = wanted(worlds, cases)
    assert worlds.run(4, hashes, nodes, "1", cases, deadline_s=300) == [right] * 4


def train_on_own_data(where: str) -> str:
    """The script divides its samples among the ranks, one after the other."""
    elastic = {"reduction_block": 4, "accumulate": where}
    settings = {
        "train_batch_size": 13,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "elastic": elastic,
    }
    engine, *_ = zero_deepspeed.initialize(model=Product(), config=settings)
    for number in range(engine.global_rank, 14, engine.world_size):
        engine.backward(engine(numbers(min(number, 12), sum(WIDTHS))))
        engine.step()
    assert engine.global_steps == 1
    return engine.weight_hash()


def test_samples_that_a_script_divides_by_itself_give_the_bits_of_owner(worlds: WorldPool) -> None:
    (alone,) = worlds.run(1, train_on_own_data, "local")
    assert worlds.run(2, train_on_own_data, "local") == [alone] * 2
    assert worlds.run(2, train_on_own_data, "owner") == [alone] * 2


# ---- what travels, and what is kept ----


def kept_in_step(engine: Engine) -> list[int]:
    """Train one step; the bytes of pieces that this rank kept after each micro-step."""
    zero, kept = engine._core.zero, []
    assert zero is not None
    for batch in engine.training_dataloader or ():
        engine.backward(engine(batch))
        kept.append(sum(each.nbytes for each in zero.spill.here()))
        engine.step()
        if engine.global_steps:
            break
    return kept


def cost(nodes: str, where: str, block: int) -> tuple[int, int]:
    """Of one step in bf16: the bytes sent, and the elements."""
    (engine,) = on_nodes(nodes, lambda: [make_at(where, 1, "bf16", block)])
    kept_in_step(engine)
    core = engine._core
    assert core.reducer is not None
    reduction = core.reducer.pipeline.reduction
    assert isinstance(reduction, NodeReduction)
    groups = {reduction.collectives, reduction.between}  # one group, where any order is right
    sent_bytes = sum(group.bytes_sent["pieces"] for group in groups)
    return sent_bytes, sum(unit.padded for unit in core.units)


@pytest.mark.parametrize("where", [Where.NODE, Where.LOCAL])
def test_what_travels_is_what_the_plan_says_to_the_byte(worlds: WorldPool, where: Where) -> None:
    """Equal nodes, whose slices need no rounding."""
    found = worlds.run(4, cost, "2,2", where.value, 4)
    plan = planned(where, (2, 2), 4)
    by_plan = traffic(plan, found[0][1], gradient_bytes=2)
    by_node = [sum(bytes_ for bytes_, _ in found[first : first + 2]) for first in (0, 2)]
    planned_bytes = zip(by_plan.inside_bytes, by_plan.between_bytes, strict=True)
    assert by_node == [inside + between for inside, between in planned_bytes]


def planned(where: Where, nodes: tuple[int, ...], block: int) -> Plan:
    """The plan of the first step."""
    assignment = {
        Where.OWNER: lambda: strided(sum(nodes)),
        Where.NODE: lambda: node_turns(nodes, block),
        Where.LOCAL: lambda: contiguous(sum(nodes)),
    }[where]()
    return plan_reduction(assignment.rows(COUNT), block=block, nodes=nodes, where=where)


def check_kept(plan: Plan, dtype: str, rank: int, elements: int, kept: Sequence[int]) -> None:
    """Compare what a rank kept after each micro-step with the plan: in fp32 to the byte.

    In a node whose size does not divide a gradient, slices may differ by an element. The plan
    counts single gradients as sums; in 16 bits they have half the bytes.
    """
    node, _ = plan.slices.topology.place(rank)
    assert len(kept) == len(plan.micro_steps)
    for number, (step, real) in enumerate(zip(plan.micro_steps, kept, strict=True)):
        most = plan.kept_bytes(number, rank, elements)
        least = most if dtype == "fp32" else most // 2
        slack = SUM_BYTES * len(step.nodes[node].keeps) if elements % plan.nodes[node] else 0
        assert least - slack <= real <= most + slack, (rank, number)


Kept = tuple[int, list[int]]
"""The elements of all gradients, and what a rank kept after each micro-step."""


def kept_of_each(nodes: str, cases: Sequence[Case]) -> list[Kept]:
    found = []
    for case in cases:
        (engine,) = on_nodes(nodes, lambda case=case: [make_at(*case)])
        found.append((sum(unit.padded for unit in engine._core.units), kept_in_step(engine)))
    return found


@pytest.mark.parametrize("nodes", [(3, 1), (2, 2), (1, 2, 1), (1, 1, 1, 1), (4,)], ids=str)
@pytest.mark.corners(nodes=[(3, 1)])
def test_what_is_kept_between_micro_steps_is_what_the_plan_says_to_the_byte(
    worlds: WorldPool, nodes: tuple[int, ...]
) -> None:
    """Pieces that are pending or early: at owners, nodes and ranks. Other groupings are in
    tests/groupings."""
    cases = [
        (where.value, stage, dtype, block)
        for where, stage in ((Where.OWNER, 2), (Where.NODE, 3), (Where.LOCAL, 1))
        for dtype, block in (("fp32", 8), ("bf16", 8))
        if where is not Where.NODE or len(nodes) > 1
    ]
    found = worlds.run(4, kept_of_each, ",".join(map(str, nodes)), cases)
    for number, (where, _, dtype, block) in enumerate(cases):
        plan, most = planned(Where(where), nodes, block), 0
        for rank, of_cases in enumerate(found):
            elements, kept = of_cases[number]
            check_kept(plan, dtype, rank, elements, kept)
            most = max(most, *kept)
        assert most


# ---- what is kept beyond a budget ----


def spilled(budget: int, cases: Sequence[Case]) -> list[tuple[str, int]]:
    """The weights of each case, and the most bytes that were in host memory after a micro-step."""
    found = []
    for case in cases:
        (engine,) = on_nodes("2,2", lambda case=case: [make_at(*case, budget)])
        zero, most = engine._core.zero, 0
        assert zero is not None
        while engine.global_steps < 2:
            for batch in engine.training_dataloader or ():
                engine.backward(engine(batch))
                assert zero.spill.here_bytes <= budget
                most = max(most, sum(each.nbytes for each in zero.spill.away()))
                engine.step()
        assert not zero.spill.here_bytes
        found.append((digest(train(engine)), most))
    return found


def test_what_is_kept_beyond_the_budget_is_in_host_memory_and_the_bits_are_the_same(
    worlds: WorldPool,
) -> None:
    """At owners, in nodes, on ranks; a budget is for none or for some of the pieces."""
    cases = [("owner", 2, "fp32", 16), ("node", 1, "bf16", 8), ("local", 0, "bf16", 4)]
    right = [digest(expected(dtype, block)) for _, _, dtype, block in cases]
    for budget, sent_away in ((0, [True, True, True]), (1 << 12, [False, True, True])):
        for rank in worlds.run(4, spilled, budget, cases):
            assert [weights for weights, _ in rank] == right
            assert [bytes_ > 0 for _, bytes_ in rank] == sent_away


def move_in_the_middle() -> str:
    """After each micro-step everything that can be moved to the host is, and comes back."""
    (engine,) = on_nodes("1,1", lambda: [make_at("node", 1, "fp32", 8)])
    zero, moved = engine._core.zero, 0
    assert zero is not None
    while engine.global_steps < 2:
        for batch in engine.training_dataloader or ():
            engine.backward(engine(batch))
            held = list(zero.spill.here())
            engine.offload_states()
            assert not any(each.untyped_storage().nbytes() for each in held)
            engine.reload_states()
            moved += len(held)
            engine.step()
    assert moved
    return digest(train(engine))


def test_pieces_that_senders_hold_are_moved_with_the_other_states(worlds: WorldPool) -> None:
    assert worlds.run(2, move_in_the_middle) == [digest(expected("fp32", 8))] * 2


@pytest.mark.parametrize(
    ("kept", "free", "coming", "budget"),
    [
        (10, 30, 20, None),  # all of it fits
        (11, 30, 20, 10),  # beside what the first step allocates
        (11, 10, 20, 0),
        (0, 10, 20, 0),
    ],
)
def test_what_a_device_has_no_room_for_waits_in_host_memory(
    kept: int, free: int, coming: int, budget: int | None
) -> None:
    assert device_budget(kept, free, coming) == budget


def test_a_run_is_refused_with_figures_where_the_host_does_not_hold_the_sums() -> None:
    gib = 1 << 30
    turns = Accumulation(where=Where.NODE, topology=Topology(nodes=(2, 2)), block=16)
    fits = HostMemory(30 * gib, 0, 40 * gib)
    compare(turns, [fits, fits])
    told = []
    for where in (Where.NODE, Where.OWNER):
        with pytest.raises(ConfigError) as refusal:
            compare(replace(turns, where=where), [fits, replace(fits, free_bytes=gib)])
        told.append(str(refusal.value))
    figures = (
        "keeps 30720 MiB of sums of rank 1 in host memory between micro-steps, and 1024 MiB are "
        "left there for each rank of its node"
    )
    assert told == [
        f'elastic.accumulate: "node" {figures}; use "owner", which keeps 0 MiB and sends more, or '
        "give the rank more memory",
        f'elastic.accumulate: "owner" {figures}; train on a multiple of 16 ranks, which keep '
        "nothing, or give the rank more memory",
    ]


def continue_larger(root: str) -> None:
    """The checkpoint brings its 3000 micro-batches."""
    engines = []
    for micro_steps, where in ((1500, "owner"), (1, "local")):
        settings = too_large(where) | {"gradient_accumulation_steps": micro_steps}
        del settings["train_batch_size"]
        engines.append(start(settings))
    first, then = engines
    first.save_checkpoint(root)
    then.load_checkpoint(root)
    begin_step(then)


@pytest.mark.full
def test_sums_that_do_not_fit_with_the_batch_of_a_checkpoint_are_refused(
    worlds: WorldPool, tmp_path: Path
) -> None:
    if available_bytes() > 160 << 30:
        pytest.skip(f"this machine has {available_bytes() >> 30} GiB")
    with pytest.raises(WorldError, match=r'"local" keeps \d+ MiB of sums of rank 0'):
        worlds.run(2, continue_larger, str(tmp_path))


# ---- what cannot be done ----


def refusals() -> list[str]:
    """What a script is told that asks for the sum, or changes the step, in the middle of it."""
    told = []
    for misuse in (read, set_gradient, add_a_loss, choose_samples, go_beyond_the_batch):
        (engine,) = on_nodes("1,1", lambda: [make_at("local", 1, "fp32", 4)])
        batch = next(iter(engine.training_dataloader or ()))
        engine.backward(engine(batch))
        with pytest.raises(ZeroError) as refused:
            misuse(engine, batch)
        told.append(str(refused.value))
    return told


def read(engine: Engine, _batch: Tensor) -> None:
    safe_get_full_grad(engine.module.rows[0])


def set_gradient(engine: Engine, _batch: Tensor) -> None:
    safe_set_full_grad(engine.module.rows[0], torch.zeros(WIDTHS[0]))


def add_a_loss(engine: Engine, batch: Tensor) -> None:
    engine.backward(engine(batch))


def choose_samples(engine: Engine, _batch: Tensor) -> None:
    engine.batch_sampler(Samples())


def go_beyond_the_batch(engine: Engine, batch: Tensor) -> None:
    engine.step()
    with engine.no_sync():
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(batch))


def test_what_needs_the_sum_in_the_middle_of_a_step_is_refused(worlds: WorldPool) -> None:
    reading, setting, loss, sampler, end = worlds.run(2, refusals)[0]
    assert 'with elastic.accumulate "local" the gradient is there in the last micro-s' in reading
    assert reading == setting
    assert 'backward() twice before step() with elastic.accumulate "local"' in loss
    assert 'batch_sampler() in the middle of a step with elastic.accumulate "local"' in sampler
    assert "no_sync() around the last micro-step of the batch with elastic.accumulate" in end


def too_large(where: str) -> dict[str, Any]:
    """Each rank would keep all of its 1500 micro-batches: 70 GB."""
    return {
        "train_batch_size": 3000,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "SGD"},
        "elastic": {"accumulate": where, "reduction_block": 1},
    }


def train_too_large() -> None:
    begin_step(start(too_large("local")))


def start(settings: dict[str, Any]) -> Engine:
    data: Any = [torch.ones(3400)] * 3000
    engine, *_ = zero_deepspeed.initialize(
        model=nn.Linear(3400, 3400), training_data=data, config=settings
    )
    return engine


def begin_step(engine: Engine) -> None:
    for batch in engine.training_dataloader or ():
        engine.backward(engine(batch).sum())
        break


def test_sums_that_do_not_fit_are_refused_with_figures_before_the_first_step(
    worlds: WorldPool,
) -> None:
    padded = -(-3400 * 3401 // 2048) * 2048
    kept = 1499 * 4 * padded
    if available_bytes() > 2 * kept:
        pytest.skip(f"this machine has the {2 * kept >> 30} GiB")
    message = (
        f'"local" keeps {kept >> 20} MiB of sums of rank 0 in host memory between micro-steps, and '
        r'\d+ MiB are left there for each rank of its node; use "owner", which keeps 0 MiB'
    )
    with pytest.raises(WorldError, match=message):
        worlds.run(2, train_too_large)


def test_the_estimate_counts_what_nodes_keep() -> None:
    """70 billion parameters on 8 x 8 GPUs: a piece of 4N/8 bytes, beside the shard of 4N/64."""
    estimates = []
    for where in ("owner", "node"):
        elastic = {"accumulate": where, "reduction_block": 16}
        settings = {
            "train_batch_size": 512,
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 2},
            "elastic": elastic,
        }
        config = load_config(settings)
        estimates.append(estimate(config, 70 * 10**9, 64, node_ranks=8))
    owner, node = estimates
    assert node.gradients - owner.gradients == 35 * 10**9


def resumed(root: str) -> None:
    (first,) = on_nodes("1,1", lambda: [make_at("owner", 1, "fp32", 4)])
    train(first, 1)
    first.save_checkpoint(root)
    (then,) = on_nodes("1,1", lambda: [make_at("node", 1, "fp32", None)])
    then.load_checkpoint(root)


def test_a_checkpoint_whose_blocks_are_not_those_of_the_turns_names_the_key_to_set(
    worlds: WorldPool, tmp_path: Path
) -> None:
    message = "sums gradients in blocks of 4; set elastic.reduction_block to 4 as well"
    with pytest.raises(WorldError, match=message):
        worlds.run(2, resumed, str(tmp_path))
