"""The script's DataLoader in the order of this project: each sample once, at any world size."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from zero_contract.errors import ConfigError
from zero_data.elastic_loader import ElasticLoader, sampler_of
from zero_data.global_batch import Assignment, BatchShape, Cursor
from zero_data.lanes.adapters.loaders import given_by
from zero_data.lanes.loader import LaneLoader
from zero_data.lanes.order import Exchange, LaneOrder

_WAYS_OUT = (
    "protect(model, optimizer) without a loader keeps checkpoints, and your script the position "
    "of its data in client_state"
)

OTHER_THREAD = (
    "run.loader is iterated in another thread than the one that trains, which begins micro-steps "
    "here: give the DataLoader num_workers and prefetch_factor instead"
)
PASSED_OVER = (
    "a batch of run.loader was drawn and not trained, and the next one was drawn: its samples "
    "would be lost. Call backward() for every batch; let a bad one contribute 0 * its loss"
)
NOT_ITS_TURN = (
    "this is not the batch whose turn it is: run the batches of run.loader in the order in which "
    "they are drawn, each once"
)
NOT_STEPPED = (
    "the script ends behind the backward of a last micro-batch, whose step was not taken: the "
    "samples of that step are not trained, and no checkpoint has it; call run.step(), or "
    "optimizer.step(), for every batch, the last one too"
)
"""Mistakes of a loop over it, and their remedies."""


def check_is_loader(loader: object) -> None:
    """Raise ConfigError if it is no DataLoader, with the ways out."""
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"protect() got a {type(loader).__name__} as its loader, which is no DataLoader of "
            "torch: its samples have no numbers, so they cannot be divided over any number of "
            f"ranks. Give DataLoader(dataset, batch_size=...), also of an IterableDataset; or "
            f"{_WAYS_OUT}"
        )


def in_order(
    loader: DataLoader[Any],
    microbatches: int,
    cursor: Cursor,
    rank: int,
    assignment: Assignment,
    seed: int,
    exchange: Exchange,
) -> ElasticLoader | LaneLoader:
    """`run.loader`: this rank's micro-batches of a DataLoader, from the position of `cursor` on.

    Raises:
        ConfigError: See `given_by`; or the dataset is too small.
    """
    given = given_by(loader, seed, exchange)
    assert given.micro_batch is not None
    batch = BatchShape(microbatches=microbatches, micro_batch=given.micro_batch)
    where: dict[str, Any] = {
        "batch": batch,
        "cursor": cursor,
        "rank": rank,
        "world": assignment.world,
        "assignment": assignment,
    }
    # A map-style dataset; others are read in lanes.
    if given.source is None:
        sampler = sampler_of(
            given.dataset,
            seed=seed,
            shuffle=bool(given.shuffle),
            drop_last=given.drop_last,
            seeds_forward=True,
            **where,
        )
        return ElasticLoader(sampler, **given.options)
    order = LaneOrder(given.dataset, drop_last=given.drop_last, exchange=exchange, **where)
    return LaneLoader(order, given.source, seed=seed, seeds_forward=True, **given.options)
