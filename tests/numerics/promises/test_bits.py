"""One training has one hash at every step: in every back end, at every world size, clipped.

The model has a tied head, dropout, and parameters that are frozen, seldom or never used. The norm
is clipped at almost every step: one that differs in its last bits shows after a hundred of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.numerics.promises.back_ends import (
    CORNERS,
    DTYPES,
    EVERYWHERE,
    PRECISIONS,
    WITH_EVERYTHING,
    Everything,
    Place,
    Recipe,
    by_torch_alone,
    hashes,
    training,
)
from tests.support.plain import plain_torch
from tests.support.training import config, make_engine, train
from tests.support.world import WorldPool
from zero_comm.exchange.cpu.same_host import SWITCH

SHORT, LONG = 4, 300


def halves(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def counted(batch: Tensor) -> int:
    return int(batch[:, 0].sum())


CLIPPED = replace(WITH_EVERYTHING, max_norm=0.05)


def in_precision(precision: str) -> Recipe:
    model = partial(Everything, freezes=precision not in DTYPES)
    return replace(CLIPPED, precision=precision, model=model)


OPTIONS: dict[str, Recipe] = {
    "all at once": replace(CLIPPED, scheduler=halves, counts=counted),
    "nothing": WITH_EVERYTHING,
    "clipped": CLIPPED,
    "scheduled": replace(WITH_EVERYTHING, scheduler=halves),
    "tokens": replace(WITH_EVERYTHING, counts=counted),
    "own calls": replace(CLIPPED, own_loop=True),
    **{precision: in_precision(precision) for precision in PRECISIONS[1:]},
}


def places_of(places: Sequence[Place], recipe: Recipe) -> list[Place]:
    """Those that have its precision: DDP and one process have no policy of mixed precision."""
    without = ("plain", "ddp") if recipe.precision in DTYPES else ()
    return [place for place in places if place[0] not in without]


def first_difference(found: Sequence[str], expected: Sequence[str]) -> int | None:
    """The first step whose hash is not the expected one."""
    steps = zip(found, expected, strict=True)
    return next((step for step, (one, other) in enumerate(steps, 1) if one != other), None)


def differing(
    worlds: WorldPool, places: Sequence[Place], recipe: Recipe, steps: int
) -> dict[Place, int]:
    """Of each place that differs from the first one, the step in which it begins to."""
    expected: list[str] = []
    found = {}
    for back_end, world in places_of(places, recipe):
        ranks = worlds.run(world, hashes, recipe, back_end, steps, deadline_s=120.0 + 3.0 * steps)
        for rank in ranks:
            expected = expected or rank
            found[back_end, world] = first_difference(rank, expected)
    assert len(set(expected)) == steps
    return {place: step for place, step in found.items() if step is not None}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.corners(option=["all at once"])
def test_a_training_has_one_hash_at_every_step(worlds: WorldPool, option: str) -> None:
    assert differing(worlds, CORNERS, OPTIONS[option], SHORT) == {}


@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.corners(own_loop=[True])
def test_it_is_what_torch_computes_from_the_same_micro_batches(
    worlds: WorldPool, own_loop: bool
) -> None:
    recipe = replace(WITH_EVERYTHING, scheduler=halves, own_loop=own_loop)
    (expected,) = worlds.run(1, by_torch_alone, recipe)
    for back_end, world in [("plain", 1), ("stage3", 2), ("ddp", 2)]:
        assert worlds.run(world, hashes, recipe, back_end, 4) == [expected] * world, back_end


def weights(settings: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(settings)
    train(engine, 4)
    return {name: value.numpy() for name, value in engine.module_state_dict().items()}


def test_clipping_follows_torch_up_to_the_rounding_of_the_norm(worlds: WorldPool) -> None:
    options = {"lr": 0.1, "momentum": 0.9}
    settings = config(stage=3, optimizer={"type": "SGD", "params": options})
    ours = worlds.run(2, weights, settings)[0]
    theirs = plain_torch(4, "SGD", options, clip=0.5)
    for key, value in ours.items():
        np.testing.assert_allclose(value, theirs[key], rtol=1e-5, atol=1e-7)


def last_of_each(back_end: str, steps: int) -> dict[str, str]:
    recipes = OPTIONS | {"seed": replace(CLIPPED, seed=7)}
    return {name: hashes(recipe, back_end, steps)[-1] for name, recipe in recipes.items()}


def test_each_option_and_the_seed_have_a_result_of_their_own(worlds: WorldPool) -> None:
    """Else a test above could pass with any of them switched off."""
    (found,) = worlds.run(1, last_of_each, "fsdp2", 2)
    assert len(set(found.values())) == len(found)


BF16 = [("stage0", 1), ("fsdp2", 2), ("stage3", 3)]


def test_in_bf16_there_is_one_hash_too(worlds: WorldPool) -> None:
    assert differing(worlds, BF16, OPTIONS["bf16"], 3) == {}


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_long_clipped_training_has_one_hash_at_every_step(
    worlds: WorldPool, precision: str
) -> None:
    places = EVERYWHERE if precision == "fp32" else CORNERS[1:5] + CORNERS[-2:]
    assert differing(worlds, places, in_precision(precision), LONG) == {}


# ---- where sums are formed, and what carries them ----


def on_nodes(recipe: Recipe, back_end: str) -> tuple[list[str], bool]:
    """The hashes, and whether the ranks know of several nodes of several ranks."""
    own = training(recipe, back_end)
    return list(own.hashes(SHORT)), own.session._collectives.topology.divides


@pytest.mark.parametrize("nodes", ["2,2", "1,3"])
@pytest.mark.parametrize("back_end", ["ddp", "fsdp2", "hsdp", "stage0", "stage2", "stage3"])
@pytest.mark.corners(nodes=["2,2"], back_end=["stage3"])
def test_sums_that_begin_inside_of_nodes_are_the_same(
    worlds: WorldPool, back_end: str, nodes: str
) -> None:
    recipe = replace(CLIPPED, nodes=nodes)
    (expected,) = worlds.run(1, hashes, recipe, "plain", SHORT)
    assert worlds.run(4, on_nodes, recipe, back_end) == [(expected, True)] * 4


def among(unwilling: tuple[int, ...], back_end: str) -> tuple[int, list[str]]:
    """How many ranks exchange by memory with this one, and what comes of it."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() in unwilling:
            patch.setenv(SWITCH, "0")
        own = training(CLIPPED, back_end)
        near = own.session._collectives.transports.of(torch.device("cpu")).near
        return len(near), list(own.hashes(SHORT))


@pytest.mark.parametrize("unwilling", [(), (2,), (0, 1, 2)], ids=["memory", "both", "sockets"])
@pytest.mark.parametrize("back_end", ["ddp", "stage2"])
@pytest.mark.corners(unwilling=[(2,)], back_end=["stage2"])
def test_memory_and_sockets_carry_the_same_bits(
    worlds: WorldPool, unwilling: tuple[int, ...], back_end: str
) -> None:
    (expected,) = worlds.run(1, hashes, CLIPPED, "plain", SHORT)
    together = 3 if not unwilling else 2 if unwilling == (2,) else 1
    for rank, (near, found) in enumerate(worlds.run(3, among, unwilling, back_end)):
        assert near == (1 if rank in unwilling else together)
        assert found == expected
