"""Datasets whose samples have numbers: lanes read the numbers that fall to them, and nothing else.

Must always hold: every number is read by one lane; the position is the whole state.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from zero_contract.errors import ConfigError, ZeroError
from zero_data.global_batch import mix, permute
from zero_data.lanes.adapters.libraries import home_of
from zero_data.lanes.adapters.place import Worker, seeded
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


@dataclass(frozen=True)
class Indexed:
    """A map-style dataset; each lane has every n-th number of the epoch's order."""

    dataset: Any
    shuffle: bool = True
    seed: int = 0

    def __deepcopy__(self, _: object) -> Indexed:
        return self  # all lanes read this one: they have its generators in common

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
            # A copy: the sampler is the script's, and may be that of another loader as well.
            sampler = copy.copy(self._sampler)
            sampler.generator = torch.Generator().manual_seed(mix(self._seed, epoch) >> 1)
            self._epoch, self._drawn = epoch, list(sampler)
        return self._dataset[self._drawn[place]]


class Batches:
    """A map-style dataset in the batches of a batch sampler, each of which is a micro-batch.

    Those of an epoch are what a copy of the sampler draws as a job of one rank, with random numbers
    (its generators', and those of the process) of the seed and the epoch alone.
    """

    def __init__(self, dataset: Any, sampler: Any, seed: int) -> None:
        """Read a dataset by a sampler, which stays as it is.

        Raises:
            ConfigError: The sampler has no length, so it may have no end.
        """
        self._dataset, self._sampler, self._seed = dataset, sampler, seed
        self._epoch: int | None = None
        self._drawn: list[list[int]] = []
        try:
            len(sampler)
        except (TypeError, NotImplementedError) as error:
            raise ConfigError(
                f"the batch sampler of the DataLoader, a {type(sampler).__name__}, has no length "
                f"({error}), so an epoch of it may have no end; {_BATCH_SIZE}, or give it __len__()"
            ) from None

    def check(self, exchange: Callable[[Tensor], Tensor]) -> int:
        """Check that all ranks draw the same batches, and again. Collective.

        Returns:
            The samples of the largest batch of the first epoch, or what the sampler says.

        Raises:
            ConfigError: They do not, or their batches have no end.
        """
        once, again = ([self._draw(epoch) for epoch in (0, 1)] for _ in range(2))
        digest = hashlib.sha256(repr(once).encode()).digest()
        own = int.from_bytes(digest[:7], "big") if once == again else -1
        digests = {int(each) for each in exchange(torch.tensor([own], device="cpu")).flatten()}
        if digests != {own} or own < 0:
            name, why = type(self._sampler).__name__, _AGAIN if -1 in digests else _SHARE
            raise ConfigError(
                f"the batch sampler of the DataLoader, a {name}, {why}; or {_BATCH_SIZE}"
            )
        given = getattr(self._sampler, "batch_size", None)
        return given if isinstance(given, int) else max(map(len, once[0]), default=1)

    def open(self, lane: int, lanes: int, epoch: int, state: dict[str, Any] | None) -> Reader:
        """See `Source`; a sample is a batch here."""
        if epoch != self._epoch:
            self._epoch, self._drawn = epoch, self._draw(epoch)
        return _Numbers(self, range(lane, len(self._drawn), lanes), epoch, state)

    def read(self, place: int, epoch: int) -> list[Any]:
        """The samples of a batch of the epoch that was opened last."""
        numbers = self._drawn[place]
        if hasattr(self._dataset, "__getitems__"):
            return list(self._dataset.__getitems__(numbers))
        return [self._dataset[number] for number in numbers]

    def _draw(self, epoch: int) -> list[list[int]]:
        try:
            # The dataset is shared: it may be large, and is only read.
            sampler = copy.deepcopy(self._sampler, {id(self._dataset): self._dataset})
        except Exception as error:
            raise ConfigError(
                f"the batch sampler of the DataLoader, a {type(self._sampler).__name__}, cannot be "
                f"copied ({error}), and each epoch is drawn by a copy; {_BATCH_SIZE}"
            ) from error
        seed = mix(self._seed, epoch)
        _begin(sampler, epoch, seed)
        says = len(sampler)
        most = 2 * says + size_of(self._dataset)  # a length may be an estimate
        with seeded(seed), Worker(0, 1, epoch, alone=True):
            drawn = [[int(n) for n in batch] for batch in itertools.islice(sampler, most + 1)]
        if len(drawn) > most:
            raise ConfigError(
                f"the batch sampler of the DataLoader, a {type(sampler).__name__}, has more "
                f"than {most} batches in an epoch and says that it has {says}: it may have no end; "
                f"let it end, or {_BATCH_SIZE}"
            )
        return [batch for batch in drawn if batch]  # an empty one would end its lane


_BATCH_SIZE = "give batch_size and shuffle in its place"
_AGAIN = (
    "draws other batches when it begins an epoch again; let it draw by a generator or a seed that "
    "it keeps, and by set_epoch(epoch)"
)
_SHARE = (
    "gives the batches of one rank; give one of the whole dataset, such as with num_replicas=1 and "
    "rank=0, and of a loader that accelerator.prepare() returns the one that it was made of"
)


def _begin(sampler: Any, epoch: int, seed: int) -> None:
    """Give a sampler, and those that it draws from, the random numbers of an epoch."""
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    for name, value in [*getattr(sampler, "__dict__", {}).items()]:
        match value:
            case torch.Generator():
                value.manual_seed(seed >> 1)
            case random.Random() | np.random.RandomState():
                value.seed(seed % (1 << 32))
            case np.random.Generator():
                setattr(sampler, name, np.random.default_rng(seed))
            case Sampler():
                _begin(value, epoch, seed)
            case _:
                pass


class _Numbers(Iterator[Any]):
    def __init__(
        self,
        source: Indexed | Drawn | Batches,
        places: range,
        epoch: int,
        state: dict[str, Any] | None,
    ) -> None:
        self._source, self._places, self._epoch = source, places, epoch
        self._next = 0 if state is None else state["next"]

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

    def __deepcopy__(self, _: object) -> Shards:
        return self  # see `Indexed`

    def open(self, lane: int, lanes: int, epoch: int, state: dict[str, Any] | None) -> Reader:
        """See `Source`."""
        ends = np.cumsum(np.asarray(self.dataset.shard_sizes, dtype=np.int64))
        size = int(ends[-1]) if len(ends) else 0
        if (lowest := min(self.dataset.shard_sizes, default=0)) < 0:
            raise ConfigError(f"shard_sizes: {lowest} is not a number of samples")
        begin = lane * size // lanes if state is None else state["next"]
        return _Range(self.dataset, begin, (lane + 1) * size // lanes, ends)


class _Range(Iterator[Any]):
    def __init__(self, dataset: ShardedIterable, begin: int, end: int, ends: Any) -> None:
        self._dataset, self._next, self._end, self._ends = dataset, begin, end, ends
        self._samples: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._next >= self._end:
            raise StopIteration
        shard = int(np.searchsorted(self._ends, self._next, side="right"))
        number = self._next - (int(self._ends[shard - 1]) if shard else 0)
        if self._samples is None or not number:  # the next shard begins
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
