"""The training loader: this rank's part of a dataset, in the engine's order.

Must always hold: the loader begins at the run's position, for every kind of dataset.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.data import (
    DataLoader,
    Dataset,
)

from zero_comm.exchange.collectives import Collectives
from zero_comm.worker.distributed import local_device
from zero_contract.errors import ConfigError
from zero_data.elastic_loader import ElasticLoader, MicroBatchSampler, sampler_of
from zero_data.lanes.adapters import source_of
from zero_data.lanes.loader import LaneLoader, reads_lanes
from zero_data.lanes.order import LaneOrder
from zero_engine.config import Config
from zero_engine.parts import Run
from zero_step.lane_states import BEGINS

Collate = Callable[[list[Any]], Any]


def training_loader(
    config: Config,
    run: Run,
    collectives: Collectives,
    dataset: Dataset[Any],
    collate_fn: Collate | None = None,
    num_workers: int = 0,
) -> ElasticLoader | LaneLoader:
    """A loader of this rank's micro-batches, from the run's position on."""
    if isinstance(dataset, DataLoader):
        raise ConfigError(
            "training_data: a DataLoader, whose batches would be taken for samples; give its "
            "dataset and collate_fn, or give it batch_sampler=engine.batch_sampler(dataset)"
        )
    options: dict[str, Any] = {
        "collate_fn": collate_fn,
        "num_workers": num_workers,
        "pin_memory": pins_memory(),
    }
    if not reads_lanes(dataset):
        return ElasticLoader(microbatch_sampler(config, run, dataset), **options)
    source = source_of(dataset)
    if not run.managed:
        raise ConfigError(
            f"training_data: {type(dataset).__name__} can only be iterated, and a step has one "
            "micro-batch of each of its lanes, which managed_gradient_accumulation: false leaves "
            "open; remove that, or give a map-style dataset"
        )
    order = LaneOrder(
        dataset,
        batch=run.batch,
        cursor=run.cursor,
        rank=run.rank,
        world=run.world,
        drop_last=config.dataloader_drop_last,
        assignment=run.accumulation.assignment,
        exchange=partial(collectives.everybodys, what=BEGINS),
    )
    return LaneLoader(order, source, seed=config.seed, **options)


def microbatch_sampler(config: Config, run: Run, dataset: Dataset[Any]) -> MicroBatchSampler:
    """This rank's micro-batches of a map-style dataset, shuffled if the config says so."""
    return sampler_of(
        dataset,
        batch=run.batch,
        cursor=run.cursor,
        rank=run.rank,
        world=run.world,
        seed=config.seed,
        shuffle=config.elastic.shuffle,
        drop_last=config.dataloader_drop_last,
        managed=run.managed,
        assignment=run.accumulation.assignment,
    )


def pins_memory() -> bool:
    """Whether batches are pinned: only if they are copied to a GPU."""
    return local_device().type == "cuda"
