"""The source of any dataset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from zero_contract.errors import ConfigError
from zero_data.lanes.adapters.indexed import Indexed, ShardedIterable, Shards, is_indexed
from zero_data.lanes.adapters.iterables import Iterables
from zero_data.lanes.source import Source


def reads_lanes(dataset: Any) -> bool:
    """Whether lanes read a dataset: its samples have no numbers."""
    return isinstance(dataset, IterableDataset) or not is_indexed(dataset)


def source_of(dataset: Any) -> Source:
    """The source by which lanes read a dataset.

    Args:
        dataset: A source; a dataset in shards (`shard_sizes`, `read_shard`); a map-style dataset;
            an iterable, of torch or of a library; or a function that makes one for (lane, lanes),
            for libraries that take rank and world size when a dataset is made.

    Raises:
        ConfigError: It cannot be begun again, or cannot be divided; or it is a DataLoader.
    """
    if isinstance(dataset, DataLoader):
        raise ConfigError(
            f"a {type(dataset).__name__}, whose batches would be taken for samples: a stage reads "
            "the samples of a dataset; give it that, and the rest of what the loader says to Lanes"
        )
    if hasattr(dataset, "open") and not isinstance(dataset, Iterable):
        source: Source = dataset
        return source
    if isinstance(dataset, ShardedIterable):
        return Shards(dataset)
    if is_indexed(dataset):
        return Indexed(dataset)
    if isinstance(dataset, Iterator) or not (isinstance(dataset, Iterable) or callable(dataset)):
        raise ConfigError(
            f"training_data: {type(dataset).__name__} cannot be begun again, so a position in it "
            "cannot be found; give a dataset whose iter() starts from the beginning, or a function "
            "that makes one for (lane, lanes)"
        )
    return Iterables(dataset)
