"""Iterable datasets that are cut into shards: each rank reads only what it runs.

Owns the order of the samples, and reads them in it. Must always hold: the order depends on the
sizes of the shards and the micro-batch alone, so the shards are a fixed number of virtual readers
at every world size; every sample is at exactly one position.

A dataset offers `shard_sizes`, the number of samples in each shard, and `read_shard(shard, start)`,
an iterator of the shard's samples from number `start` on. Files with a row count, such as Parquet
or indexed archives, are shards already.

Source of the idea: fixed virtual workers (EasyScale, arXiv 2208.14228).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch.utils.data import Dataset

from zero_contract.errors import ConfigError, ZeroError

_READ_OVER = 1024
"""The largest gap in samples that is skipped by reading; else the shard is opened again."""


@runtime_checkable
class ShardedIterable(Protocol):
    """The interface of a sharded dataset."""

    shard_sizes: Sequence[int]

    def read_shard(self, shard: int, start: int) -> Iterator[Any]:
        """The samples of a shard from number `start` on."""


class Interleaving:
    """Takes `chunk` samples from each shard in turn, until all are used up."""

    def __init__(self, sizes: Sequence[int], chunk: int) -> None:
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._chunk = chunk
        if (self._sizes < 0).any():
            raise ConfigError(f"shard_sizes: {int(self._sizes.min())} is not a number of samples")

    @property
    def size(self) -> int:
        """The number of all samples."""
        return int(self._sizes.sum())

    def place(self, position: int) -> tuple[int, int]:
        """The shard of a position, and the number of the sample in it."""
        row, high = 0, int(self._sizes.max()) // self._chunk + 1
        while high - row > 1:
            middle = (row + high) // 2
            row, high = (middle, high) if self._before(middle) <= position else (row, middle)
        widths = np.clip(self._sizes - row * self._chunk, 0, self._chunk)
        ends = np.cumsum(widths)
        within = position - self._before(row)
        shard = int(np.searchsorted(ends, within, side="right"))
        return shard, int(row * self._chunk + within - (ends[shard] - widths[shard]))

    def _before(self, row: int) -> int:
        """The number of samples before a row of chunks."""
        return int(np.minimum(self._sizes, row * self._chunk).sum())


class ShardReader(Dataset[Any]):
    """A sharded dataset indexed by position; reads shards forward where possible."""

    def __init__(self, dataset: ShardedIterable, chunk: int) -> None:
        self._dataset = dataset
        self._order = Interleaving(dataset.shard_sizes, chunk)
        self._open: dict[int, tuple[int, Iterator[Any]]] = {}

    def __len__(self) -> int:
        return self._order.size

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        """The samples at these positions of an epoch."""
        return [self._read(*self._order.place(position)) for position in positions]

    def _read(self, shard: int, number: int) -> Any:
        at, samples = self._open.pop(shard, (0, None))
        if samples is None or not 0 <= number - at <= _READ_OVER:
            at, samples = number, iter(self._dataset.read_shard(shard, number))
        for here, sample in enumerate(samples, at):
            if here == number:
                self._open[shard] = (number + 1, samples)
                return sample
        raise ZeroError(
            f"training_data: shard {shard} has no sample {number}, though shard_sizes says so; "
            "give the sizes that read_shard() really has"
        )
