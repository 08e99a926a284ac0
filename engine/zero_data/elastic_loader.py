"""The loader: the rest of an epoch, micro-batch by micro-batch, from the committed position.

Owns the way from a position to batches. Must always hold: iterating reads the position and
never moves it, whatever has been prefetched; only `engine.step()` moves it. What a rank is
given is a function of (seed, position, world, rank), so a run that goes on at another world
size consumes every sample exactly once. Random augmentation is seeded per micro-batch, in worker
processes and without them, so that it does not depend on who loads a sample.

Made by `assembly`; users iterate it; `engine` asks it which samples it handed out last. `streams`
has the loader of datasets that can only be iterated, `own_loader` the order for other loaders.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from zero_contract.errors import ConfigError, ZeroError
from zero_data.global_batch import (
    BatchShape,
    Cursor,
    MicroBatch,
    StepPlan,
    micro_steps_left,
    mix,
    plan_epoch,
    plan_rest,
    sample_ids,
)

PAST_THE_EPOCH = (
    "the epoch has ended, and its last micro-steps await a step(); call engine.step() at the end "
    "of each epoch: a step does not straddle two"
)
_AUGMENTATION = 1
"""Keeps the seeds of data apart from those of dropout, which mix (seed, step, micro-batch)."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Which micro-batch a batch is, and the samples in it."""

    start: int
    """The position in the run of its first sample."""
    ids: tuple[int, ...]
    seed: int


class Feed(Protocol):
    """Where a run's batches come from: what the engine asks any loader."""

    @property
    def last(self) -> Ticket | None:
        """The batch handed out last."""

    @property
    def epoch_size(self) -> int | None:
        """Samples used per epoch; None while nobody knows."""

    @property
    def dataset_size(self) -> int | None:
        """Samples that there are; None while nobody knows."""

    def expect(self, dataset_size: int) -> None:
        """Hear from a checkpoint how many there are."""

    def adopt_batch(self, batch: BatchShape) -> None:
        """Go on with another global batch."""

    def leave_steps_to_script(self) -> bool:
        """From now on the script decides where steps end; False if that cannot be."""


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """A dataset and the order in which it is walked."""

    dataset: Dataset[Any]
    size: int
    epoch_size: int
    """Samples used per epoch: `size`, less the tail if it is dropped."""
    shuffle_key: int | None


def make_source(
    dataset: Dataset[Any], batch: BatchShape, *, shuffle: bool, seed: int, drop_last: bool
) -> DataSource:
    """Check a dataset and fix its order.

    Raises:
        ConfigError: It has no length, is empty, or smaller than the one batch it must fill.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"{type(dataset).__name__} has no length and no random access; give a map-style "
            "dataset, or pass it to initialize(training_data=...), which reads it in its order"
        )
    size = len(dataset)
    epoch_size = size // batch.samples * batch.samples if drop_last else size
    if epoch_size == 0:
        raise ConfigError(
            f"training_data: {size} samples do not fill one global batch of {batch.samples}"
            if size
            else "training_data: the dataset is empty"
        )
    return DataSource(
        dataset=dataset, size=size, epoch_size=epoch_size, shuffle_key=seed if shuffle else None
    )


@dataclass(kw_only=True)
class MicroBatchSampler:
    """The leaves of one rank, as tickets; the loader's batch sampler."""

    source: DataSource
    batch: BatchShape
    cursor: Cursor
    rank: int
    world: int
    seed: int
    managed: bool = True
    """Steps are those of `batch`; False: the script decides where they end."""

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to; counts from 0."""
        return self.cursor.samples // self.source.epoch_size

    def leave_steps_to_script(self) -> bool:
        """As `Feed` says: without padding micro-batches, samples come in one order."""
        if self.batch.microbatches % self.world == 0:
            self.managed = False
        return not self.managed

    def __len__(self) -> int:
        """Micro-batches from here to the end of the epoch."""
        position, epoch_size, begun = self.cursor.samples, self.source.epoch_size, self.cursor.micro
        if self.managed:
            return micro_steps_left(position, self.batch, epoch_size, self.world) - begun
        return self._rest().micro_steps(self.world) - begun

    def __iter__(self) -> Iterator[Ticket]:
        """The leaves from the committed position to the end of the epoch.

        Raises:
            ZeroError: All have run, and the script has not ended the step.
        """
        if not self.managed:
            yield from self._tickets_of_rest()
            return
        begun = self.cursor.micro
        plans = plan_epoch(self.cursor.samples, self.batch, self.source.epoch_size)
        for step, plan in enumerate(plans, self.cursor.step):
            for micro in range(begun, plan.micro_steps(self.world)):
                microbatch = plan.microbatch(micro, self.rank, self.world)
                yield self._ticket(
                    plan, microbatch, microbatch_seed(self.seed, step, microbatch.index)
                )
            begun = 0

    def _rest(self) -> StepPlan:
        return plan_rest(self.cursor.samples, self.batch, self.source.epoch_size)

    def _tickets_of_rest(self) -> Iterator[Ticket]:
        # Nobody knows yet in which step a micro-batch will run: its place in the run seeds it.
        plan, begun = self._rest(), self.cursor.micro
        if begun == plan.micro_steps(self.world):
            raise ZeroError(PAST_THE_EPOCH)
        for micro in range(begun, plan.micro_steps(self.world)):
            microbatch = plan.microbatch(micro, self.rank, self.world)
            yield self._ticket(
                plan, microbatch, microbatch_seed(self.seed, plan.position + microbatch.start, 0)
            )

    def _ticket(self, plan: StepPlan, microbatch: MicroBatch, seed: int) -> Ticket:
        source = self.source
        ids = sample_ids(plan, microbatch, source.size, source.epoch_size, source.shuffle_key)
        return Ticket(plan.position + microbatch.start, tuple(ids), seed)


class ElasticLoader:
    """Iterates over the rest of the current epoch in this rank's micro-batches.

    Each iteration begins at the committed position and ends with the epoch; the next one is the
    next epoch. Padding micro-batches are included: every rank gets equally many.
    """

    # Nothing that this class owns refers back to it: in a reference cycle, the garbage collector
    # would end the queues before the worker processes, and torch would wait 5 s for each.

    def __init__(
        self,
        sampler: MicroBatchSampler,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.sampler = sampler
        self.last: Ticket | None = None
        """The batch handed out last."""
        self._loader: DataLoader[Any] = DataLoader(
            _SeededDataset(sampler.source.dataset),
            batch_sampler=sampler,  # type: ignore[arg-type]
            collate_fn=_Collate(collate_fn or default_collate),  # type: ignore[arg-type]
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=num_workers > 0,
        )

    @property
    def dataset(self) -> Dataset[Any]:
        """The user's dataset."""
        return self.sampler.source.dataset

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to; counts from 0."""
        return self.sampler.epoch

    @property
    def epoch_size(self) -> int:
        """Samples used per epoch."""
        return self.sampler.source.epoch_size

    @property
    def dataset_size(self) -> int:
        """Samples in the dataset."""
        return self.sampler.source.size

    def expect(self, dataset_size: int) -> None:
        """Nothing to do: the dataset has a length."""

    def adopt_batch(self, batch: BatchShape) -> None:
        """Go on with another global batch."""
        self.sampler.batch = batch

    def leave_steps_to_script(self) -> bool:
        """From now on the script decides where steps end; False if that cannot be."""
        return self.sampler.leave_steps_to_script()

    def __len__(self) -> int:
        """Micro-batches that an iteration begun now would yield."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        batch_shape, epoch = self.sampler.batch, self.epoch
        for ticket, batch in self._loader:
            self.last = ticket
            yield batch
            if self.sampler.batch is not batch_shape:
                break
        else:
            return
        # Another batch size: what has been planned and prefetched is void. Go on from the
        # position, unless the epoch ended there.
        if self.epoch == epoch:
            yield from self


def seed_everything(seed: int) -> None:
    """Begin the random numbers of augmentation at a place of its own."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


def microbatch_seed(seed: int, step: int, microbatch: int) -> int:
    """Where the augmentation of one micro-batch begins."""
    return mix(seed, step, microbatch, _AUGMENTATION)


class _SeededDataset(Dataset[Any]):
    """Fetches the samples of one ticket; its random state depends on the micro-batch alone."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, ticket: Ticket) -> tuple[Ticket, Sequence[Any]]:
        seed_everything(ticket.seed)
        if hasattr(self._dataset, "__getitems__"):
            return ticket, self._dataset.__getitems__(list(ticket.ids))
        return ticket, [self._dataset[i] for i in ticket.ids]


class _Collate:
    """Lets the ticket pass beside the batch."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, fetched: tuple[Ticket, Sequence[Any]]) -> tuple[Ticket, Any]:
        ticket, samples = fetched
        return ticket, self._collate_fn(samples)
