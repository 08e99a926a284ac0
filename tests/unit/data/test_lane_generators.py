"""Generators of random numbers of data that lanes read: seeded, whoever keeps and makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from tests.support.lanes import trained
from zero_data.lanes import Mixture, Shuffle

SIZE, LANES, STEPS = 24, 4, 8
"""Two steps more than an epoch has."""


class Kept:
    """Keeps a generator that is made, unseeded, where it is first drawn from."""

    numpy: ClassVar[np.random.Generator | None] = None
    torch: ClassVar[torch.Generator | None] = None


def by_numpy() -> float:
    if Kept.numpy is None:
        Kept.numpy = np.random.default_rng()
    return float(Kept.numpy.random())


def by_torch() -> float:
    if Kept.torch is None:
        Kept.torch = torch.Generator()
        Kept.torch.seed()
    return float(torch.rand((), generator=Kept.torch))


Draw = Callable[[], float]
Row = tuple[int, float]


class Flat(IterableDataset[Row]):
    """Knows nothing of lanes."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[Row]:
        for number in range(SIZE):
            yield number, self.draw()


class Shuffled(Flat):
    """Draws its order where its iterator is made."""

    def __iter__(self) -> Iterator[Row]:
        return iter([(number, 0.0) for number in sorted(range(SIZE), key=lambda _: self.draw())])


class Divided(Flat):
    def numbers(self) -> range:
        info = get_worker_info()
        assert info is not None
        return range(info.id, SIZE, info.num_workers)

    def __iter__(self) -> Iterator[Row]:
        for number in self.numbers():
            yield number, self.draw()


class DividedAtOnce(Divided):
    def __iter__(self) -> Iterator[Row]:
        return iter([(number, self.draw()) for number in self.numbers()])


class Stateful(Flat):
    at = 0

    def __iter__(self) -> Iterator[Row]:
        while self.at < SIZE:
            self.at += 1
            yield self.at - 1, self.draw()

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Rows(Dataset[Row]):
    def __init__(self, draw: Draw) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, number: int) -> Row:
        return number, self.draw()


class OwnRows(Rows):
    """Has a generator of its own, with other numbers in each process."""

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.rng = np.random.default_rng()

    def __getitem__(self, number: int) -> Row:
        return number, float(self.rng.random())


class Sharded:
    """The same, in shards."""

    shard_sizes = (7, 9, 8)

    def __init__(self, _: Draw) -> None:
        self.rng = np.random.default_rng()

    def read_shard(self, shard: int, start: int) -> Iterator[Row]:
        first = sum(self.shard_sizes[:shard])
        for number in range(first + start, first + self.shard_sizes[shard]):
            yield number, float(self.rng.random())


def drawn(draw: Draw) -> DataLoader[Row]:
    rows = Rows(draw)
    return DataLoader(rows, 1, sampler=WeightedRandomSampler([1.0] * SIZE, SIZE))


def mixed(one: Any, other: Any) -> Mixture:
    return Mixture({"one": one, "other": other}, {"one": 1, "other": 1})


KINDS: dict[str, Callable[[Draw], Any]] = {
    "one part": Flat,
    "shuffled at its begin": Shuffled,
    "divided": Divided,
    "divided at its begin": DividedAtOnce,
    "with a state": Stateful,
    "map-style": Rows,
    "map-style, by a sampler": drawn,
    "map-style, with its own": OwnRows,
    "shards with their own": Sharded,
    "a shuffle of rows with their own": lambda draw: Shuffle(OwnRows(draw), buffer=4),
    "a mixture of rows with their own": lambda draw: mixed(OwnRows(draw), OwnRows(draw)),
    "a mixture": lambda draw: mixed(Rows(draw), Divided(draw)),
}


@pytest.mark.parametrize("draw", [by_numpy, by_torch])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_draws_the_numbers_of_an_undisturbed_run(kind: str, draw: Draw) -> None:
    def run(*rounds: tuple[int, int]) -> list[Any]:
        steps, state = [], None
        for world, until in rounds:
            Kept.numpy = Kept.torch = None  # each round has processes of its own
            found = trained(
                lambda: KINDS[kind](draw),
                world,
                until=until,
                state=state,
                lanes=LANES,
                batch_size=1,
            )
            steps, state = steps + found.steps, found.state
        return steps

    alone = run((1, STEPS))
    assert run((1, 3), (1, STEPS)) == alone
    assert run((2, 3), (3, STEPS)) == alone
