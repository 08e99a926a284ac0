"""The script's DataLoader in the order of this project: each sample once, at any world size.

Must always hold: whether samples are shuffled is what the DataLoader says; which rank runs which of
them is what `zero_data` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from zero_contract.errors import ConfigError
from zero_data.elastic_loader import ElasticLoader, MicroBatchSampler, make_source
from zero_data.global_batch import BatchShape, Cursor

_OF_WORKERS = (
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "timeout",
)
"""What a DataLoader says of its worker processes."""


def shuffles(loader: DataLoader[Any]) -> bool:
    """Whether a DataLoader shuffles its samples.

    Raises:
        ConfigError: Its order is its own, so it cannot be distributed over any number of ranks.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            f"{type(loader.dataset).__name__} is an IterableDataset, whose samples have no "
            "numbers; give a map-style dataset, with __len__ and __getitem__"
        )
    if loader.batch_size is None:
        raise ConfigError(
            "the DataLoader has no batch_size: zero_torch decides which samples are a micro-batch; "
            "give batch_size, the samples of a micro-batch, and no batch_sampler"
        )
    match loader.sampler:
        case SequentialSampler():
            return False
        case RandomSampler() if not loader.sampler.replacement:
            return True
        case DistributedSampler():
            return loader.sampler.shuffle
        case _:
            raise ConfigError(
                f"the DataLoader has a {type(loader.sampler).__name__}, whose order depends on "
                "this process; give shuffle=True or shuffle=False and no sampler"
            )


def in_order(
    loader: DataLoader[Any], batch: BatchShape, cursor: Cursor, rank: int, world: int, seed: int
) -> ElasticLoader:
    """This rank's part of a DataLoader, from the position of `cursor` on.

    Raises:
        ConfigError: See `shuffles`; or the dataset is too small.
    """
    source = make_source(
        loader.dataset, batch, shuffle=shuffles(loader), seed=seed, drop_last=loader.drop_last
    )
    sampler = MicroBatchSampler(
        source=source, batch=batch, cursor=cursor, rank=rank, world=world, seed=seed
    )
    return ElasticLoader(
        sampler,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        **{name: getattr(loader, name) for name in _OF_WORKERS},
    )


class MicroBatches:
    """`run.loader`: an iteration is the rest of an epoch, and each of its batches a micro-batch."""

    def __init__(
        self, batches: ElasticLoader, begin: Callable[[], None], end: Callable[[], None]
    ) -> None:
        """Iterate.

        Args:
            batches: The batches of this rank.
            begin: Called before each batch.
            end: Called after the last one.
        """
        self.batches = batches
        self._begin = begin
        self._end = end

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to; counts from 0."""
        return self.batches.epoch

    @property
    def dataset(self) -> Any:
        """The script's dataset."""
        return self.batches.dataset

    def __len__(self) -> int:
        """The micro-batches of this rank from the position to the end of the epoch."""
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        """This rank's micro-batches.

        Raises:
            ZeroError: The step of the micro-batches before was not taken.
        """
        self._end()  # of an iteration that the script has left: the position comes after it
        for batch in self.batches:
            self._begin()
            yield batch
        self._end()
