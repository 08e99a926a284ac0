"""Where the sums of several micro-steps are formed changes no bit, under any back end.

Steps of 11 and of 4 micro-batches, in blocks of 2: the nodes take several turns, and the last step
of an epoch is short, with padding micro-batches of some ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.numerics.promises.back_ends import (
    SAMPLES,
    OfEngine,
    OfStockTorch,
    Recipe,
    Training,
    agreed,
    hashes,
    training,
)
from tests.numerics.promises.test_bits import OPTIONS
from tests.numerics.promises.test_dtypes import Complex, Of, adam, momentum
from tests.support import stock
from tests.support.queued import BACKEND
from tests.support.traffic import traffic
from tests.support.world import WorldPool
from zero_comm.sums.node import NodeReduction
from zero_comm.sums.plan import Where, plan_reduction
from zero_comm.topology import Topology
from zero_contract.errors import ConfigError
from zero_data import read_ledger, verify
from zero_step.gradients.accumulation import Accumulation

STEPS = 4
BLOCK = 2
RECIPE = replace(OPTIONS["all at once"], microbatches=11)
NODES = {1: ["1"], 2: ["1,1", "2"], 3: ["1,2", "3", "1,1,1"], 4: ["2,2", "1,3", "4", "1,1,1,1"]}
"""By world, the ranks of each node."""
BY_MODE = {
    "owner": ("plain", "ddp", "fsdp2", "hsdp", "stage1"),
    "node": ("plain", "ddp", "fsdp2", "columns", "hsdp", "stage0", "stage3"),
    "local": ("plain", "ddp", "stage0", "stage1"),
}


def recipe(where: str, nodes: str = "", given: Recipe = RECIPE, **elastic: Any) -> Recipe:
    sections = {"elastic": {"accumulate": where, "reduction_block": BLOCK, **elastic}}
    return replace(given, nodes=nodes, sections=sections)


def sums_of(own: Training) -> Accumulation:
    """Where it adds."""
    if isinstance(own, OfEngine):
        return own.engine._core.layout.sums
    assert isinstance(own, OfStockTorch)
    return own.run._sums


def expected_mode(where: str, nodes: str) -> str:
    """That of a round."""
    sizes = nodes.split(",")
    acts = nodes != "1" and (where != "node" or len(sizes) > 1)
    return where if acts else "owner"


def found(given: Recipe, back_end: str) -> tuple[str, list[str]]:
    """Where it adds, and the hash after each step."""
    own = training(given, back_end)
    steps = list(own.hashes(STEPS))
    own.close()
    return sums_of(own).where.value, steps


@pytest.fixture(scope="module")
def whole(worlds: WorldPool) -> list[str]:
    """The hashes of one process."""
    return agreed(worlds.run(1, hashes, recipe("owner"), "plain", STEPS))


def places() -> Iterator[tuple[str, str, str]]:
    """Mode, back end, and nodes."""
    for where, back_ends in BY_MODE.items():
        for back_end in back_ends:
            worlds = (1,) if back_end == "plain" else (1, 3, 4) if back_end == "hsdp" else NODES
            for world in worlds:
                yield from ((where, back_end, nodes) for nodes in NODES[world])


@pytest.mark.parametrize("place", list(places()), ids=" ".join)
@pytest.mark.corners(place=[("local", "ddp", "1,2"), ("node", "fsdp2", "1,3")])
def test_the_hash_of_every_step_is_that_of_one_process_wherever_sums_are_formed(
    worlds: WorldPool, place: tuple[str, str, str], whole: list[str]
) -> None:
    where, back_end, nodes = place
    world = sum(map(int, nodes.split(",")))
    given = recipe(where, nodes)
    assert (
        worlds.run(world, found, given, back_end) == [(expected_mode(where, nodes), whole)] * world
    )


@pytest.mark.full
@pytest.mark.parametrize("option", ["clipped", "own calls", "autocast"])
@pytest.mark.parametrize("place", [("local", "ddp"), ("node", "ddp"), ("node", "fsdp2")])
def test_it_is_with_every_option_of_a_script(
    worlds: WorldPool, option: str, place: tuple[str, str]
) -> None:
    where, back_end = place
    given = replace(OPTIONS[option], microbatches=11)
    alone = agreed(worlds.run(1, hashes, recipe("owner", "", given), "plain", STEPS))
    ranks = worlds.run(4, found, recipe(where, "2,2", given), back_end)
    assert ranks == [(where, alone)] * 4


GIVEN: dict[str, Recipe] = {
    "bfloat16": Recipe(model=partial(Of, torch.bfloat16), optimizer=momentum, microbatches=11),
    "float16": Recipe(model=partial(Of, torch.float16), optimizer=momentum, microbatches=11),
    "complex": Recipe(model=partial(Complex, torch.complex64), optimizer=adam, microbatches=11),
    "static graph": replace(RECIPE, model=stock.GPT, of_wrapper=(("static_graph", True),)),
    "one bucket": replace(RECIPE, of_wrapper=(*Recipe.of_wrapper, ("bucket_cap_mb", 25))),
}


@pytest.mark.full
@pytest.mark.parametrize("where", ["local", "node"])
@pytest.mark.parametrize("name", GIVEN)
def test_it_is_in_every_dtype_and_with_every_option_of_ddp(
    worlds: WorldPool, name: str, where: str
) -> None:
    alone = agreed(worlds.run(1, hashes, recipe("owner", "", GIVEN[name]), "plain", STEPS))
    assert worlds.run(3, found, recipe(where, "1,2", GIVEN[name]), "ddp") == [(where, alone)] * 3


CHAIN = [
    ("local", "ddp", "1,2"),
    ("node", "stage3", "2,2"),
    ("local", "plain", "1"),
    ("node", "fsdp2", "1,3"),
    ("owner", "ddp", "2"),
    ("local", "stage1", "1,1"),
    ("node", "hsdp", "2,2"),
    ("local", "ddp", "4"),
]


def phase(given: Recipe, back_end: str, root: str, number: int) -> list[str]:
    """Goes on for a step, saves, and trains another one, and the half of one, in vain."""
    own = training(given, back_end, weights=number)
    own.load(f"{root}/checkpoints")
    steps = list(own.hashes(number + 1))
    own.save(f"{root}/checkpoints")
    own.train(number + 2)
    for (batch,) in own.loader:
        own.backward(batch)
        break
    own.close()
    return steps


@pytest.mark.parametrize(
    "chain", [CHAIN[2:6], pytest.param(CHAIN, marks=pytest.mark.full)], ids=["some", "all"]
)
def test_each_phase_of_a_training_may_form_its_sums_elsewhere(
    worlds: WorldPool, tmp_path: Path, chain: list[tuple[str, str, str]]
) -> None:
    """With another back end, and other nodes; each sample counts once."""
    steps, ledger = list[str](), str(tmp_path / "ledger")
    for number, (where, back_end, nodes) in enumerate(chain):
        world = sum(map(int, nodes.split(",")))
        given = recipe(where, nodes, sample_ledger=ledger)
        steps += agreed(worlds.run(world, phase, given, back_end, str(tmp_path), number))
    assert steps == agreed(worlds.run(1, hashes, recipe("owner"), "plain", len(chain)))
    report = verify(read_ledger(Path(ledger)), SAMPLES)
    assert (report.problems, report.steps) == ((), len(chain) + 1)


def begun_again(given: Recipe, back_end: str, directory: str) -> tuple[int, list[str]]:
    """In the middle of each second step its checkpoint is loaded once more.

    Returns the bytes that are kept behind the last step, and the hash of each.
    """
    own = training(given, back_end)
    assert isinstance(own, OfStockTorch)
    own.save(directory)
    steps = list[str]()
    for step in range(STEPS):
        if step % 2:
            own.backward(next(iter(own.loader))[0])
            own.load(directory)
        steps += own.hashes(step + 1)
        own.save(directory)
    reduction = own.run._gradients.pipeline.reduction
    assert isinstance(reduction, NodeReduction)
    held = [tensor for each in reduction._held.values() for tensor in (*each.own, *each.of_node)]
    return sum(each.nbytes for each in held), steps


@pytest.mark.parametrize("place", [("local", "ddp"), ("node", "fsdp2")], ids=" ".join)
@pytest.mark.corners(place=[("local", "ddp")])
def test_a_step_that_is_dropped_in_its_middle_leaves_nothing_in_the_next(
    worlds: WorldPool, tmp_path: Path, place: tuple[str, str], whole: list[str]
) -> None:
    where, back_end = place
    given = recipe(where, "1,2")
    found = worlds.run(3, begun_again, given, back_end, str(tmp_path))
    assert found == [(0, whole)] * 3


def norms(given: Recipe, back_end: str) -> list[float | None]:
    """The norm of each step: such a group gathers no weights for a hash."""
    own = training(given, back_end)
    return [own.norm for _ in own.steps(STEPS)]


@pytest.mark.parametrize(
    "place", [("local", "ddp"), ("node", "ddp"), ("node", "fsdp2")], ids=" ".join
)
@pytest.mark.corners(place=[("local", "ddp")])
def test_it_is_over_a_group_that_matches_exchanges_by_their_order_alone(
    worlds: WorldPool, place: tuple[str, str]
) -> None:
    where, back_end = place
    (alone,) = worlds.run(1, norms, recipe("owner"), "plain")
    given = recipe(where, "2,2")
    assert worlds.run(4, norms, given, back_end, backend=BACKEND) == [alone] * 4
    assert None not in alone


# ---- what travels ----


def sent(given: Recipe) -> tuple[int, Counter[str]]:
    """Of the third step of DDP, a full one: the elements that are divided, and bytes by kind."""
    own = training(given, "ddp")
    assert isinstance(own, OfStockTorch)
    reduction = own.run._gradients.pipeline.reduction
    assert isinstance(reduction, NodeReduction)
    groups = {own.session._collectives, reduction.collectives, reduction.between}
    own.train(2)
    before = sum((each.bytes_sent for each in groups), Counter[str]())
    own.train(3)
    after = sum((each.bytes_sent for each in groups), Counter[str]())
    sums = own.run._gradients._sums.items()
    shards = sum(each.total.numel() for name, each in sums if not name.startswith("the end of"))
    return shards * 4, after - before


def test_of_ddp_travels_what_the_plan_says_to_the_byte(worlds: WorldPool) -> None:
    """The weights' sums and the ends of gradients in one go: the same in every mode."""
    nodes, gathered = (2, 2), set[int]()
    for where in Where:
        ranks = worlds.run(4, sent, recipe(where.value, "2,2"))
        own = Accumulation(where=where, topology=Topology(nodes=nodes), block=BLOCK)
        rows = own.assignment.rows(RECIPE.microbatches)
        plan = plan_reduction(rows, block=BLOCK, nodes=nodes, where=where)
        planned = traffic(plan, ranks[0][0], gradient_bytes=4)
        bytes_sent = sum(kinds["pieces"] for _, kinds in ranks)
        assert bytes_sent == sum(planned.inside_bytes + planned.between_bytes), where
        gathered.add(sum(kinds["gather"] for _, kinds in ranks))
    assert len(gathered) == 1


# ---- sums of the backend ----


def by_backend(where: str) -> tuple[list[Tensor], int]:
    """The weights, and the bytes of the third step, which has four micro-steps of three ranks."""
    own = training(recipe(where, reduction="native", reduction_block=None), "ddp")
    assert isinstance(own, OfStockTorch)
    own.train(2)
    group = own.run._gradients.pipeline.reduction.collectives
    before = group.bytes_sent["reduce"]
    own.train(3)
    return own.weights(), group.bytes_sent["reduce"] - before


def test_the_backend_may_sum_once_in_a_step(worlds: WorldPool) -> None:
    (in_every, sent_bytes), *_ = worlds.run(3, by_backend, "owner")
    for weights, once_bytes in worlds.run(3, by_backend, "local"):
        torch.testing.assert_close(weights, in_every, rtol=1e-4, atol=1e-5)
        assert once_bytes * 4 == sent_bytes


# ---- refusals ----


def of_another_block(directory: str) -> str:
    own = training(recipe("local", "1,1"), "ddp")
    own.train(1)
    own.save(directory)
    with pytest.raises(ConfigError) as refused:
        training(recipe("local", "1,1", reduction_block=None), "ddp").load(directory)
    return str(refused.value)


def test_a_checkpoint_of_another_block_is_refused_with_the_block_to_set(
    worlds: WorldPool, tmp_path: Path
) -> None:
    for told in worlds.run(2, of_another_block, str(tmp_path)):
        assert told.endswith(
            "sums gradients in blocks of 2; set elastic.reduction_block to 2 as well"
        )
