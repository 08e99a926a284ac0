"""Loaders by purpose: training walks the engine's order, evaluation a plain one; repeating.

Must always hold: only the training loader knows the run's position; an evaluation loader starts
from its beginning each time and touches nothing of the run.

Called by `assembly` and `Engine.deepspeed_io`; scripts use `RepeatingLoader`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    default_collate,
)

from zero_comm.distributed import local_device
from zero_contract.errors import ConfigError
from zero_data.elastic_loader import ElasticLoader, LeafSampler, make_source
from zero_data.shards import ShardedIterable, ShardReader
from zero_data.streams import StreamLoader, StreamSteps
from zero_engine.config import Config
from zero_engine.parts import Run

Collate = Callable[[list[Any]], Any]


def training_loader(
    config: Config,
    run: Run,
    dataset: Dataset[Any],
    collate_fn: Collate | None = None,
    num_workers: int = 0,
) -> ElasticLoader | StreamLoader:
    """A loader of this rank's leaves, from the run's position on."""
    if isinstance(dataset, ShardedIterable):
        reader = ShardReader(dataset, run.batch.micro_batch)
        sampler = leaf_sampler(config, run, reader, shuffle=False)
    elif isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return _stream_loader(config, run, dataset, collate_fn, num_workers)
    else:
        sampler = leaf_sampler(config, run, dataset)
    return ElasticLoader(
        sampler, collate_fn=collate_fn, num_workers=num_workers, pin_memory=_pins_memory()
    )


def leaf_sampler(
    config: Config, run: Run, dataset: Dataset[Any], *, shuffle: bool | None = None
) -> LeafSampler:
    """This rank's leaves of a map-style dataset; shuffled as the config says."""
    source = make_source(
        dataset,
        run.batch,
        shuffle=config.elastic.shuffle if shuffle is None else shuffle,
        seed=config.seed,
        drop_last=config.dataloader_drop_last,
    )
    return LeafSampler(
        source=source,
        batch=run.batch,
        cursor=run.cursor,
        rank=run.rank,
        world=run.world,
        seed=config.seed,
        managed=run.managed,
    )


def _stream_loader(
    config: Config, run: Run, dataset: Any, collate_fn: Collate | None, num_workers: int
) -> StreamLoader:
    if not isinstance(dataset, Iterable) or isinstance(dataset, Iterator):
        raise ConfigError(
            f"training_data: {type(dataset).__name__} cannot be begun again, so a position in it "
            "cannot be found; give a dataset, or an object whose iter() starts from the beginning"
        )
    if not run.managed:
        raise ConfigError(
            f"training_data: {type(dataset).__name__} can only be iterated, and is read a global "
            "batch at a time, which managed_gradient_accumulation: false leaves open; remove that, "
            "or give a map-style dataset or one that is cut into shards"
        )
    steps = StreamSteps(
        dataset=dataset,
        batch=run.batch,
        rank=run.rank,
        world=run.world,
        seed=config.seed,
        drop_last=config.dataloader_drop_last,
        collate=collate_fn or default_collate,
    )
    return StreamLoader(steps, run.cursor, workers=num_workers, pin=_pins_memory())


def evaluation_loader(
    run: Run,
    dataset: Dataset[Any],
    batch_size: int | None,
    sampler: Sampler[Any] | None = None,
    collate_fn: Collate | None = None,
    num_workers: int = 0,
) -> DataLoader[Any]:
    """Every rank's share of a dataset, in order; the first samples are repeated to fill it.

    Raises:
        ConfigError: The dataset has no length.
    """
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"deepspeed_io: {type(dataset).__name__} has no length, so there are no shares of it; "
            "evaluate with a DataLoader of your own"
        )
    shares: DistributedSampler[Any] = DistributedSampler(
        dataset, num_replicas=run.world, rank=run.rank, shuffle=False
    )
    return DataLoader(
        dataset,
        batch_size=batch_size or run.batch.micro_batch,
        sampler=sampler or shares,
        collate_fn=collate_fn,
        num_workers=num_workers,
        pin_memory=_pins_memory(),
    )


def _pins_memory() -> bool:
    return local_device().type == "cuda"


class RepeatingLoader:
    """Begins a loader again whenever it ends: with the engine's own, epoch after epoch."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._iterator = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next batch; ends only if the loader has none at all."""
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.loader)
            return next(self._iterator)
