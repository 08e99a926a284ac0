"""The training loader: this rank's part of a dataset, in the engine's order.

Must always hold: the loader begins at the run's position, for every kind of dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    default_collate,
)

from zero_comm.worker.distributed import local_device
from zero_contract.errors import ConfigError
from zero_data.elastic_loader import ElasticLoader, MicroBatchSampler, sampler_of
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
    """A loader of this rank's micro-batches, from the run's position on."""
    if isinstance(dataset, DataLoader):
        raise ConfigError(
            "training_data: a DataLoader, whose batches would be taken for samples; give its "
            "dataset and collate_fn, or give it batch_sampler=engine.batch_sampler(dataset)"
        )
    if isinstance(dataset, ShardedIterable):
        reader = ShardReader(dataset, run.batch.micro_batch)
        sampler = microbatch_sampler(config, run, reader, shuffle=False)
    elif isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return _stream_loader(config, run, dataset, collate_fn, num_workers)
    else:
        sampler = microbatch_sampler(config, run, dataset)
    return ElasticLoader(
        sampler, collate_fn=collate_fn, num_workers=num_workers, pin_memory=pins_memory()
    )


def microbatch_sampler(
    config: Config, run: Run, dataset: Dataset[Any], *, shuffle: bool | None = None
) -> MicroBatchSampler:
    """This rank's micro-batches of a map-style dataset, shuffled if the config says so."""
    return sampler_of(
        dataset,
        batch=run.batch,
        cursor=run.cursor,
        rank=run.rank,
        world=run.world,
        seed=config.seed,
        shuffle=config.elastic.shuffle if shuffle is None else shuffle,
        drop_last=config.dataloader_drop_last,
        managed=run.managed,
        assignment=run.accumulation.assignment,
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
        cursor=run.cursor,
        seed=config.seed,
        drop_last=config.dataloader_drop_last,
        collate=collate_fn or default_collate,
        assignment=run.accumulation.assignment,
    )
    return StreamLoader(steps, workers=num_workers, pin=pins_memory())


def pins_memory() -> bool:
    """Whether batches are pinned: only if they are copied to a GPU."""
    return local_device().type == "cuda"
