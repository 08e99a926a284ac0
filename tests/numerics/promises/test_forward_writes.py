"""What forwards write: their buffers are the same at every world size, and parameters are refused.

Each module's loss depends on its buffers, so the weights show any difference.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from tests.numerics.promises.back_ends import (
    FEW,
    IN,
    PLACES,
    STEPS,
    Net,
    Place,
    Recipe,
    by_torch_alone,
    everywhere,
    hashes,
    training,
)
from tests.numerics.promises.test_habits import strict
from tests.support.saving import heard
from tests.support.world import WorldPool


class Keeps(nn.Module):
    """A module that keeps something in buffers in some way."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.down, self.head = nn.Linear(IN, IN), nn.Linear(IN, IN), nn.Linear(IN, 1)
        self.norm = nn.BatchNorm1d(IN)
        self.register_buffer("mean", torch.zeros(IN))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flag", torch.zeros(3, dtype=torch.bool))
        if how == "spectral norm":
            spectral_norm(self.down)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        return (self.head(KEEPS[self.how](self, y)) - 1.0).square().mean()


def of_batch_norm(m: Keeps, y: Tensor) -> Tensor:
    statistics = m.norm.running_mean, m.norm.running_var  # those before this forward
    mean, var = (torch.zeros(()) if each is None else each.clone() for each in statistics)
    return m.down(m.norm(torch.cat([y, y / 2]))[: len(y)] + mean + var)


def in_place(m: Keeps, y: Tensor) -> Tensor:
    with torch.no_grad():
        m.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
        m.seen += len(y)
        m.flag[int(m.seen) % 3] ^= True
    return m.down(y + m.mean * m.seen * 0.01 + m.flag.sum())


def without_a_trace(m: Keeps, y: Tensor) -> Tensor:
    m.mean.data.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
    return m.down(y + m.mean)


def replaced(m: Keeps, y: Tensor) -> Tensor:
    m.mean = 0.9 * m.mean + 0.1 * y.detach().mean(0)
    return m.down(y + m.mean)


def a_cache(m: Keeps, y: Tensor) -> Tensor:
    if m.cache.numel() < IN:
        m.cache = torch.arange(float(IN))
    return m.down(y + m.cache)


def seldom(m: Keeps, y: Tensor) -> Tensor:
    return in_place(m, y) if y.detach().sum() > 0 else m.down(y + m.mean)


def late(m: Keeps, y: Tensor) -> Tensor:
    """Begins with the third step, as what is kept after a warmup or every so many steps."""
    m.seen += 1
    return in_place(m, y) if m.seen > 2 else m.down(y)


KEEPS: dict[str, Callable[[Keeps, Tensor], Tensor]] = {
    "batch norm": of_batch_norm,
    "in place": in_place,
    "without a trace": without_a_trace,
    "replaced": replaced,
    "a cache": a_cache,
    "seldom": seldom,
    "late": late,
    "spectral norm": lambda m, y: m.down(y),
}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def wake(module: nn.Module, _: torch.optim.Optimizer, step: int) -> None:
    """Let batch norm learn from the second step on."""
    module.get_submodule("norm").train(step > 0)


@PLACES
@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize("how", [*KEEPS, "woken"])
@pytest.mark.corners(how=["batch norm", "seldom"], own_loop=[False])
def test_what_forwards_keep_is_that_of_the_first_micro_batch_of_each_step(
    worlds: WorldPool, tmp_path: Path, how: str, own_loop: bool, places: list[Place]
) -> None:
    recipe = Recipe(
        model=partial(Keeps, "batch norm" if how == "woken" else how),
        optimizer=sgd,
        own_loop=own_loop,
        before=wake if how == "woken" else None,
    )
    (expected,) = worlds.run(1, by_torch_alone, recipe)
    for place, found in everywhere(worlds, recipe, tmp_path, places).items():
        assert found == expected, place


def test_what_forwards_begin_to_keep_in_a_later_step_is_as_if_they_always_had(
    worlds: WorldPool,
) -> None:
    recipe = Recipe(model=partial(Keeps, "late"), optimizer=sgd)
    (expected,) = worlds.run(1, by_torch_alone, recipe)
    for back_end, world in FEW:
        assert worlds.run(world, hashes, recipe, back_end, STEPS) == [expected] * world, back_end


class Scaled(Net):
    """Its inputs are scaled by what a script writes to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


def shrink(module: Any, *_: object) -> None:
    module.scale.mul_(0.8)


def shrunk_once_in_a_step(back_end: str) -> str:
    """A script that writes behind the draw of the first batch, in front of its forward."""
    own, written = training(Recipe(model=Scaled, optimizer=sgd), back_end), -1
    while own.step < STEPS:
        for (batch,) in own.loader:
            if own.step > written:
                shrink(own.module)
                written = own.step
            own.backward(batch)
            own.end()
            if own.step == STEPS:
                break
    found = own.hash()
    own.close()
    return found


def test_what_a_script_writes_in_front_of_the_first_forward_of_a_step_stays(
    worlds: WorldPool,
) -> None:
    before = Recipe(model=Scaled, optimizer=sgd, before=shrink)
    ((*_, expected),) = worlds.run(1, by_torch_alone, before)
    for back_end, world in FEW:
        assert worlds.run(world, shrunk_once_in_a_step, back_end) == [expected] * world, back_end


@pytest.mark.parametrize("how", ["batch norm", "replaced"])
def test_a_self_test_leaves_buffers_as_they_were(
    worlds: WorldPool, tmp_path: Path, how: str
) -> None:
    recipe = Recipe(model=partial(Keeps, how), optimizer=sgd, within=strict)
    tested = replace(recipe, sections={"elastic": {"deterministic": "error"}})
    (expected,) = worlds.run(1, by_torch_alone, recipe)
    for place, found in everywhere(worlds, tested, tmp_path, FEW).items():
        assert found == expected, place


class Lazy(Net):
    """Makes a buffer in its first forward, of its samples or not."""

    def __init__(self, of_samples: bool) -> None:
        super().__init__()
        self.of_samples = of_samples
        self.register_buffer("scale", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = x.detach().mean(0) if self.of_samples else torch.ones(IN)
        return super().forward(x * self.scale)


def rank_0_alone(module: Any, _: object, step: int) -> None:
    if step == 1 and dist.get_rank() == 0:
        module.scale.fill_(2.0)


def each_rank_its_own(module: Any, _: object, step: int) -> None:
    if step == 1:
        module.scale.fill_(2.0 + dist.get_rank())


DIFFER: dict[str, tuple[Recipe, bool]] = {
    "rank 0 alone": (Recipe(model=Scaled, before=rank_0_alone), True),
    "each rank its own": (Recipe(model=Scaled, before=each_rank_its_own), True),
    "made of samples": (Recipe(model=partial(Lazy, True)), True),
    "made alike": (Recipe(model=partial(Lazy, False)), False),
    "all ranks alike": (Recipe(model=Scaled, before=shrink), False),
    "by forwards": (Recipe(model=partial(Keeps, "seldom")), False),
    "caches of another shape": (Recipe(model=partial(Keeps, "a cache")), False),
}
"""Buffers, and whether the ranks are told that theirs differ."""


def told_of_buffers(what: str, back_end: str) -> list[str]:
    with heard(logging.WARNING) as lines:
        own = training(DIFFER[what][0], back_end)
        own.train(4)
        own.close()
    return [line for line in lines if "has different values on the ranks" in line]


@pytest.mark.parametrize("back_end", ["ddp", "fsdp2", "stage2"])
@pytest.mark.parametrize("what", DIFFER)
@pytest.mark.corners(back_end=["ddp"])
def test_buffers_that_differ_among_the_ranks_are_told_of_once_by_name(
    worlds: WorldPool, what: str, back_end: str
) -> None:
    """DDP by itself gives all ranks those of rank 0 in each forward."""
    first, second = worlds.run(2, told_of_buffers, what, back_end)
    assert ["the buffer scale" in line for line in first] == [True] * DIFFER[what][1]
    assert second == []


class Writes(nn.Module):
    """A forward that writes to its parameters."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        bag = nn.EmbeddingBag if how == "bag" else nn.Embedding
        self.embed = bag(10, IN, max_norm=None if how == "clamped" else 0.3)
        self.down, self.head = nn.Linear(IN, IN), nn.Linear(IN, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "clamped":
            with torch.no_grad():
                self.down.weight.clamp_(-0.1, 0.1)
        y = self.embed((x * 100).long() % 10)
        y = y if self.how == "bag" else y.mean(1)
        return (self.head(self.down(y)) - 1.0).square().mean()


@PLACES
@pytest.mark.parametrize("how", ["embedding", "bag", "clamped"])
@pytest.mark.corners(how=["embedding", "clamped"])
def test_a_forward_that_writes_to_parameters_is_refused_by_name(
    worlds: WorldPool, tmp_path: Path, how: str, places: list[Place]
) -> None:
    recipe = Recipe(model=partial(Writes, how), optimizer=sgd)
    lost = ("fsdp2", "hsdp") if how == "clamped" else ()  # FSDP2 drops what is written
    places = [place for place in places if place[0] not in lost]
    for place, (error,) in everywhere(worlds, recipe, tmp_path, places).items():
        if how == "clamped":
            assert "the forward writes to the parameter down.weight" in error, place
        else:
            assert "embed has max_norm=0.3: its forward would shrink the rows" in error, place
