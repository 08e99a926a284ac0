"""Data that can only be iterated, in five lanes, for a `Recipe`; and what is consumed of it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from zero_data import read_ledger
from zero_data.lanes import Pack, Packed

WIDTH = 6
"""Numbers in a sample, or tokens."""
LENGTHS = (7, 3, 6, 0, 5)
"""An epoch has steps of 8, 7, 5 and 1 samples, in micro-batches of 2."""


class Files(IterableDataset[Any]):
    """A file for each lane, out of which samples come in an order of global random numbers."""

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        info = get_worker_info()
        assert info is not None
        yield from self.rows(info.id, 0)

    def rows(self, file: int, first: int) -> Iterator[tuple[Tensor]]:
        for number in range(first, LENGTHS[file]):
            row = torch.arange(WIDTH) * 0.1 + file + number / 7
            yield (row * random.random() + torch.randn(WIDTH),)


class Stateful(Files):
    """The same, with a state."""

    number = 0
    loaded = 0

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        info = get_worker_info()
        assert info is not None
        for sample in self.rows(info.id, self.number):
            self.number += 1
            yield sample

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "moment": torch.tensor([self.number])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        Stateful.loaded += 1
        self.number = state["number"]


class Rows(IterableDataset[Any]):
    """Some samples, of which each lane has every so many."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self._samples, self._at = samples, 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        rows = self._samples[info.id :: info.num_workers]
        while self._at < len(rows):
            self._at += 1
            yield rows[self._at - 1]
        self._at = 0


class StatefulRows(Rows):
    """The same, with a state."""

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"]


class BeginsLate(Stateful):
    """The first lane has no samples."""

    def rows(self, file: int, first: int) -> Iterator[tuple[Tensor]]:
        yield from super().rows((file + 3) % len(LENGTHS), first)


class Documents(IterableDataset[Any]):
    """Documents of 1 to 15 tokens, with a state; each lane has its own."""

    number = 0

    def __iter__(self) -> Iterator[list[int]]:
        info = get_worker_info()
        assert info is not None
        while self.number < 3 * LENGTHS[info.id]:
            self.number += 1
            size = 1 + (7 * self.number + info.id) % 15
            yield [self.number % 5 + at for at in range(size)]

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def packed() -> Pack:
    return Pack(Documents(), WIDTH, how="chunk")


def inputs(samples: list[Packed]) -> tuple[Tensor]:
    return (torch.stack([sample["input_ids"] for sample in samples]) / 7,)


KINDS: dict[str, dict[str, Any]] = {
    "no state": {"data": Files},
    "a state": {"data": Stateful},
    "packed": {"data": packed, "collate": inputs},
}
"""Of each what a `Recipe` has of it."""


def consumed(ledger: Path) -> dict[tuple[int, int], Any]:
    """What each step and lane has consumed, by its last execution: samples and their documents."""
    found = {}
    for entry in sorted(read_ledger(ledger), key=lambda entry: entry.round):
        for lane, ids in entry.microbatches.items():
            found[entry.step, lane] = ids, entry.documents.get(lane)
    return found
