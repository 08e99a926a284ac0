"""Datasets whose samples have numbers: lanes read the numbers that fall to them, and nothing else.

Must always hold: every number is read by one lane; the position is the whole state.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import Dataset

from zero_contract.errors import ConfigError, ZeroError
from zero_data.global_batch import mix, permute
from zero_data.lanes.adapters.libraries import home_of
from zero_data.lanes.source import Reader


@runtime_checkable
class ShardedIterable(Protocol):
    """A dataset in shards, such as Parquet files or archives with an index."""

    shard_sizes: Sequence[int]
    """The number of samples in each shard."""

    def read_shard(self, shard: int, start: int) -> Iterator[Any]:
        """The samples of a shard from number `start` on."""


def is_indexed(dataset: Any) -> bool:
    """Whether it is a map-style dataset, of which any sample can be read."""
    if home_of(dataset, {"grain"}):  # None stands in the place of what a filter left out
        return False
    read = getattr(type(dataset), "__getitem__", None)
    return hasattr(dataset, "__len__") and read not in (None, Dataset.__getitem__)


def size_of(dataset: Any) -> int:
    """The number of samples, whatever the number of ranks."""
    # The length of a dataset of MosaicML Streaming is the share of one rank.
    return dataset.num_samples if home_of(dataset, {"streaming"}) else len(dataset)


@dataclass(frozen=True, kw_only=True)
class Indexed:
    """A map-style dataset; each lane has every n-th number of the epoch's order."""

    dataset: Any
    shuffle: bool = True
    seed: int = 0

    def open(self, lane: int, lanes: int, epoch: int, state: dict[str, Any] | None) -> Reader:
        """See `Source`."""
        return _Numbers(self, range(lane, size_of(self.dataset), lanes), epoch, state)

    def read(self, place: int, epoch: int) -> Any:
        """The sample at a place of the order of an epoch."""
        if self.shuffle:
            size, key = size_of(self.dataset), mix(self.seed)
            place = int(permute(np.array([place]), size, key, epoch)[0])
        return self.dataset[place]


class Drawn:
    """A map-style dataset in the order of a sampler of torch, which draws anew for each epoch."""

    def __init__(self, dataset: Any, sampler: Any, seed: int) -> None:
        """Read a dataset; the sampler draws with its `generator` alone."""
        self._dataset, self._sampler, self._seed = dataset, sampler, seed
        self._epoch: int | None = None
        self._drawn: list[int] = []

    def open(self, lane: int, lanes: int, epoch: int, state: dict[str, Any] | None) -> Reader:
        """See `Source`."""
        return _Numbers(self, range(lane, len(self._sampler), lanes), epoch, state)

    def read(self, place: int, epoch: int) -> Any:
        """The sample at a place of the order of an epoch."""
        if epoch != self._epoch:
            sampler = copy.copy(self._sampler)
            sampler.generator = torch.Generator().manual_seed(mix(self._seed, epoch) >> 1)
            self._epoch, self._drawn = epoch, list(sampler)
        return self._dataset[self._drawn[place]]


class _Numbers:
    def __init__(
        self, source: Indexed | Drawn, places: range, epoch: int, state: dict[str, Any] | None
    ) -> None:
        self._source, self._places, self._epoch = source, places, epoch
        self._next = 0 if state is None else state["next"]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._next >= len(self._places):
            raise StopIteration
        self._next += 1
        return self._source.read(self._places[self._next - 1], self._epoch)

    def state(self) -> dict[str, Any]:
        """See `Reader`."""
        return {"next": self._next}


@dataclass(frozen=True)
class Shards:
    """A dataset in shards, cut into equally long ranges of samples: one for each lane."""

    dataset: ShardedIterable

    def open(self, lane: int, lanes: int, epoch: int, state: dict[str, Any] | None) -> Reader:
        """See `Source`."""
        ends = np.cumsum(np.asarray(self.dataset.shard_sizes, dtype=np.int64))
        size = int(ends[-1]) if len(ends) else 0
        if min(self.dataset.shard_sizes, default=0) < 0:
            lowest = min(self.dataset.shard_sizes)
            raise ConfigError(f"shard_sizes: {lowest} is not a number of samples")
        begin = lane * size // lanes if state is None else state["next"]
        return _Range(self.dataset, begin, (lane + 1) * size // lanes, ends)


class _Range:
    def __init__(self, dataset: ShardedIterable, begin: int, end: int, ends: Any) -> None:
        self._dataset, self._next, self._end, self._ends = dataset, begin, end, ends
        self._samples: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._next >= self._end:
            raise StopIteration
        shard = int(np.searchsorted(self._ends, self._next, side="right"))
        number = self._next - (int(self._ends[shard - 1]) if shard else 0)
        if self._samples is None or not number:
            self._samples = iter(self._dataset.read_shard(shard, number))
        for sample in self._samples:
            self._next += 1
            return sample
        raise ZeroError(
            f"training_data: shard {shard} has no sample {number}, though shard_sizes says so; "
            "give the sizes that read_shard() really has"
        )

    def state(self) -> dict[str, Any]:
        """See `Reader`."""
        return {"next": self._next}
