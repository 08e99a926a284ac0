"""A run that is resumed with other data says so; what may change between two lives stays silent."""

from __future__ import annotations

import logging
import random
import secrets
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from tests.numerics.promises.back_ends import IN, Recipe, training
from tests.support.lane_data import Stateful
from tests.support.saving import heard
from tests.support.world import WorldPool
from zero_data import Lanes

LANES = 4


def rows(size: int = 23, shift: float = 0.0) -> TensorDataset:
    drawn = torch.randn(size, IN, generator=torch.Generator().manual_seed(3))
    return TensorDataset(drawn + shift)


@dataclass
class Shifted(Stateful):
    """The same lanes, of other samples."""

    shift: float = 0.0

    def rows(self, file: int, first: int) -> Any:
        return ((row + self.shift,) for (row,) in super().rows(file, first))


class Random(TensorDataset):
    """Samples that follow from no number."""

    def __getitem__(self, number: int) -> tuple[Tensor, ...]:
        return (torch.full((IN,), secrets.randbits(16) / 7),)


class Augmented(TensorDataset):
    """Samples that draw, and have the same seed whenever they are read."""

    def __getitem__(self, number: int) -> tuple[Tensor, ...]:
        noise = np.random.random() + random.random()
        return (super().__getitem__(number)[0] + torch.rand(IN) + noise,)


DATA = {"rows": rows, "stream": Shifted}


def job(way: str, data: Any, root: str, resumes: bool, **how: Any) -> list[str]:
    """Train three steps and save, or resume, with one more step; what is said."""
    with heard(logging.WARNING) as said:
        if way == "lanes":
            lanes = Lanes(data(), batch_size=2, lanes=LANES, rank=0, world=1, **how)
            saved = Path(root) / "lanes.pt"
            if resumes:
                lanes.load_state_dict(torch.load(saved))
            for step, _ in enumerate(lanes, 1):
                if lanes.last and step == 2 * LANES:
                    break
            torch.save(lanes.state_dict(), saved)
            return said
        own = training(Recipe(data=data, **how), way)
        if resumes:
            own.load(root)
        own.train(own.step + 1)
        own.save(root)
        own.close()
    return [line for line in said if "dataset" in line]


def jobs(way: str, root: str, lives: list[Any], **how: Any) -> list[list[str]]:
    return [job(way, data, root, number > 0, **how) for number, data in enumerate(lives)]


WAYS = ("plain", "stage0", "stage3", "lanes")


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.corners(way=["plain", "stage3", "lanes"])
def test_other_data_of_the_same_size_are_a_warning_with_the_remedy_and_the_same_are_none(
    worlds: WorldPool, tmp_path: Path, way: str, kind: str
) -> None:
    same, other = DATA[kind], partial(DATA[kind], shift=1.0)
    (said,) = worlds.run(1, jobs, way, str(tmp_path), [same, same, other])
    first, second, (line,) = said
    assert (first, second) == ([], [])
    assert "is another one than the run began with" in line
    assert "give the same dataset, or begin a new run" in line


@pytest.mark.parametrize("way", ["plain", "stage3"])
def test_data_that_have_grown_are_one_warning(worlds: WorldPool, tmp_path: Path, way: str) -> None:
    (said,) = worlds.run(1, jobs, way, str(tmp_path), [rows, partial(rows, size=29)])
    (line,) = said[1]
    assert line.startswith("the number of samples in ")


@pytest.mark.parametrize("way", ["plain", "lanes"])
def test_samples_that_follow_from_no_number_are_found_by_a_resume(
    worlds: WorldPool, tmp_path: Path, way: str
) -> None:
    (said,) = worlds.run(1, jobs, way, str(tmp_path), [partial(Random, torch.zeros(23))] * 2)
    assert "is another one each time it is read" in said[1][0]
    assert "draw what is random in a sample from torch, numpy.random or random" in said[1][0]


@pytest.mark.parametrize("way", ["plain", "stage0", "lanes"])
@pytest.mark.corners(way=["plain", "lanes"])
def test_random_augmentation_is_no_other_data(worlds: WorldPool, tmp_path: Path, way: str) -> None:
    data = partial(Augmented, torch.zeros(23, IN))
    (said,) = worlds.run(1, jobs, way, str(tmp_path), [data] * 2)
    assert said[1] == []


class SeldomReadable(TensorDataset):
    """The first sample that is asked for cannot be read."""

    asked = False

    def __getitem__(self, number: int) -> Any:
        self.asked, first = True, not self.asked
        if first:
            raise OSError("the file server is away")
        return super().__getitem__(number)


@pytest.mark.parametrize("way", ["plain", "stage3"])
def test_a_sample_that_cannot_be_compared_fails_no_load(
    worlds: WorldPool, tmp_path: Path, way: str
) -> None:
    away = partial(SeldomReadable, *rows().tensors)
    (said,) = worlds.run(1, jobs, way, str(tmp_path), [rows, away])
    assert said == [[], []]


def reread(root: str, workers: int) -> tuple[list[list[str]], bool]:
    """With processes that load; and whether comparing draws from the random numbers."""
    said = jobs("plain", root, [rows, rows, partial(rows, shift=1.0)], workers=workers)
    own = training(Recipe(data=rows, workers=workers), "plain")
    own.load(root)
    behind = torch.get_rng_state()
    own.load(root)  # of a run that has begun nothing is compared
    return said, torch.equal(behind, torch.get_rng_state())


@pytest.mark.parametrize("workers", [0, 2])
def test_the_comparison_is_read_where_batches_are_and_leaves_random_numbers_alone(
    worlds: WorldPool, tmp_path: Path, workers: int
) -> None:
    ((said, kept),) = worlds.run(1, reread, str(tmp_path), workers)
    assert [len(lines) for lines in said] == [0, 0, 1]
    assert kept
