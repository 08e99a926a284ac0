"""Random numbers that a script draws by generators of its own: they are seeded, or refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.numerics.promises.back_ends import IN, Net, Place, Recipe, data, everywhere
from tests.support import drawing
from tests.support.world import WorldPool


class OwnDraws(torch.utils.data.Dataset[tuple[Tensor, ...]]):
    """A dataset that augments its samples by generators of its own."""

    def __init__(self) -> None:
        self.samples = data()
        self.numpy, self.torch = np.random.default_rng(0), torch.Generator().manual_seed(1)
        self.transforms = [partial(random.Random.uniform, random.Random(2), 0.9)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, at: int) -> tuple[Tensor, ...]:
        scale = self.transforms[0](1.1) + 0.1 * float(self.numpy.uniform())
        return (self.samples[at][0] * scale + 0.1 * torch.randn(IN, generator=self.torch),)


class Noisy(Net):
    """A module that draws by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.randn(x.shape, generator=self.rng))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.corners(workers=[0])
def test_generators_of_a_dataset_and_of_modules_are_seeded_as_those_of_the_process(
    worlds: WorldPool, tmp_path: Path, workers: int
) -> None:
    recipe = Recipe(model=Noisy, data=OwnDraws, workers=workers)
    places: list[Place] = [("plain", 1), ("ddp", 2), ("fsdp2", 2), ("stage0", 2), ("stage3", 3)]
    found = everywhere(worlds, recipe, tmp_path, places)
    assert found == dict.fromkeys(places, found["plain", 1])


class Draws(torch.utils.data.Dataset[tuple[Tensor, ...]]):
    """A dataset with a number of a generator that is not in its attributes."""

    of_class = np.random.default_rng(1)
    made_late: np.random.Generator | None = None

    def __init__(self, draw: Callable[[Any], float]) -> None:
        self.samples, self.draw = data(), draw

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, at: int) -> tuple[Tensor, ...]:
        return (self.samples[at][0] + 0.1 * self.draw(self),)


def of_class(holder: Any) -> float:
    return float(holder.of_class.random())


def of_another_module(_: object) -> float:
    return drawing.draw()


def made_late(holder: Any) -> float:
    if holder.made_late is None:
        holder.made_late = np.random.default_rng(1)
    return float(holder.made_late.random())


def collated_late(samples: list[tuple[Tensor, ...]]) -> tuple[Tensor]:
    return (torch.stack([x for (x,) in samples]) + made_late(Draws),)


def by_sampler() -> Any:
    samples = Draws(made_late)
    sampler = torch.utils.data.WeightedRandomSampler(torch.ones(len(samples)), 29)
    return torch.utils.data.DataLoader(samples, batch_size=2, sampler=sampler)


class Stream(torch.utils.data.IterableDataset[tuple[Tensor, ...]]):
    """Is shuffled where its iterator is made, and draws by a generator of the class."""

    of_class = np.random.default_rng(1)

    def __init__(self) -> None:
        self.samples = data()

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        order = [*range(len(self.samples))]
        random.shuffle(order)
        return ((self.samples[at][0] + 0.1 * self.of_class.random(),) for at in order)


class DrawsToo(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * drawing.draw())


HIDDEN: dict[str, Recipe] = {
    "in a class": Recipe(data=partial(Draws, of_class)),
    "in another module": Recipe(model=DrawsToo, data=partial(Draws, of_another_module)),
    "made late": Recipe(data=partial(Draws, made_late)),
    "made late in processes": Recipe(data=partial(Draws, made_late), workers=2),
    "made late by collate_fn": Recipe(collate=collated_late),
    "made late in lanes": Recipe(data=by_sampler),
    "in lanes": Recipe(data=Stream, collate=collated_late),
}


@pytest.mark.parametrize("where", HIDDEN)
@pytest.mark.corners(where=["in another module", "made late", "in lanes"])
def test_generators_are_seeded_wherever_they_are_kept_and_whenever_they_are_made(
    worlds: WorldPool, tmp_path: Path, where: str
) -> None:
    places: list[Place] = [("plain", 1), ("ddp", 2), ("fsdp2", 2), ("stage0", 2)]
    if where == "made late in lanes":
        places.remove(("stage0", 2))  # its batch_size is in the config alone
    found = everywhere(worlds, HIDDEN[where], tmp_path, places)
    assert found == dict.fromkeys(places, found["plain", 1])
    assert len(found["plain", 1]) == 4


class MakesLate(Net):
    rng: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.rng is None:
            self.rng = torch.Generator().manual_seed(1)
        return super().forward(x + 0.1 * torch.randn(x.shape, generator=self.rng))


class MakesLateOfClass(Net):
    rng: np.random.Generator | None = None

    def __init__(self) -> None:
        super().__init__()
        MakesLateOfClass.rng = None

    def forward(self, x: Tensor) -> Tensor:
        if MakesLateOfClass.rng is None:
            MakesLateOfClass.rng = np.random.default_rng()
        return super().forward(x + 0.1 * float(MakesLateOfClass.rng.random()))


@pytest.mark.parametrize(
    ("model", "name"),
    [(MakesLate, "rng"), (MakesLateOfClass, "that {}MakesLateOfClass uses of its class or file")],
)
def test_a_generator_that_the_first_forward_makes_is_refused_by_name(
    worlds: WorldPool, tmp_path: Path, model: type[Net], name: str
) -> None:
    places: list[Place] = [("plain", 1), ("ddp", 2), ("fsdp2", 2), ("stage0", 2), ("stage3", 2)]
    for place, told in everywhere(worlds, Recipe(model=model), tmp_path, places).items():
        named = name.format("FSDP" if place[0] == "fsdp2" else "")
        said = f"makes the generator of random numbers {named}: on each rank"
        assert [said in each for each in told] == [True], place


class OwnOrder(torch.utils.data.IterableDataset[tuple[Tensor, ...]]):
    """A stream that is shuffled by a generator of its own, and has no state."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        samples = data()
        for at in deepcopy(self.rng).permutation(len(samples)):
            yield samples[at]


def test_a_stream_that_a_step_reads_again_keeps_the_order_of_its_own_generator(
    worlds: WorldPool, tmp_path: Path
) -> None:
    recipe = Recipe(model=Noisy, data=OwnOrder)
    places: list[Place] = [("plain", 1), ("ddp", 2), ("fsdp2", 2), ("stage0", 2), ("stage3", 3)]
    found = everywhere(worlds, recipe, tmp_path, places)
    assert found == dict.fromkeys(places, found["plain", 1])
