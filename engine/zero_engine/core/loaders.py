"""The training loader: this rank's part of a dataset, in the engine's order.

Must always hold: the loader begins at the run's position, for every kind of dataset.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from zero_comm.exchange.collectives import Collectives
from zero_comm.worker.distributed import local_device
from zero_contract.errors import ConfigError
from zero_data.elastic_loader import ElasticLoader, MicroBatchSampler, sampler_of
from zero_data.lanes.adapters.loaders import Given, given_by, warn_of_seeds
from zero_data.lanes.loader import LaneLoader
from zero_data.lanes.order import LaneOrder
from zero_engine.config import Config
from zero_engine.parts import Run
from zero_step.lane_states import exchange_sizes

Collate = Callable[[list[Any]], Any]


def training_loader(
    config: Config,
    run: Run,
    collectives: Collectives,
    dataset: Any,
    collate_fn: Collate | None = None,
    num_workers: int = 0,
) -> ElasticLoader | LaneLoader:
    """A loader of this rank's micro-batches, from the run's position on.

    Of a dataset, or of a DataLoader: what that says holds where nothing else is given.

    Raises:
        ConfigError: See `given_by`; or the dataset is too small.
    """
    exchange = partial(exchange_sizes, collectives)
    given = given_by(dataset, config.seed, exchange)
    given.batch_size(run.batch.micro_batch, "train_micro_batch_size_per_gpu")
    if run.rank == 0:
        warn_of_seeds(dataset, config.seed, "seed of the config")
    own = {"collate_fn": collate_fn, "num_workers": num_workers}
    options: dict[str, Any] = {
        "pin_memory": pins_memory(),
        **given.options,
        # Last, so that they come before what the DataLoader says; what is not given leaves it.
        **{name: value for name, value in own.items() if value},
    }
    if given.source is None:
        return ElasticLoader(microbatch_sampler(config, run, given), **options)
    if not run.managed:
        raise ConfigError(
            f"training_data: {type(given.dataset).__name__} is read in lanes, and a step has one "
            "micro-batch of each, which managed_gradient_accumulation: false leaves open; remove "
            "that, or give a map-style dataset"
        )
    order = LaneOrder(
        given.dataset,
        batch=run.batch,
        cursor=run.cursor,
        rank=run.rank,
        world=run.world,
        drop_last=config.dataloader_drop_last or given.drop_last,
        assignment=run.accumulation.assignment,
        exchange=exchange,
    )
    return LaneLoader(order, given.source, seed=config.seed, **options)


def microbatch_sampler(config: Config, run: Run, given: Given) -> MicroBatchSampler:
    """This rank's micro-batches of a map-style dataset.

    Shuffled if its DataLoader says so, and without one if the config does.
    """
    return sampler_of(
        given.dataset,
        batch=run.batch,
        cursor=run.cursor,
        rank=run.rank,
        world=run.world,
        seed=config.seed,
        shuffle=config.elastic.shuffle if given.shuffle is None else given.shuffle,
        drop_last=config.dataloader_drop_last or given.drop_last,
        managed=run.managed,
        assignment=run.accumulation.assignment,
    )


def pins_memory() -> bool:
    """Whether batches are pinned: only if they are copied to a GPU."""
    return local_device().type == "cuda"
