"""The loader: the rest of an epoch, micro-batch by micro-batch, from the committed position.

Owns the way from a position to the batches of a map-style dataset. The samples of a rank are a
function of (seed, position, world, rank), so a run that resumes at another world size consumes
every sample exactly once. Random augmentation is seeded per micro-batch, with and without worker
processes, so that it does not depend on the rank or process that loads a sample.

`lanes` has the loader of iterable datasets, `own_loader` the order for other loaders.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from zero_contract.errors import ConfigError, ZeroError
from zero_contract.notices import shield
from zero_data.draws import Ticket
from zero_data.fingerprint import fingerprint
from zero_data.generators import Generator, generators_of, seed_generators
from zero_data.global_batch import (
    Assignment,
    BatchShape,
    Cursor,
    MicroBatch,
    StepPlan,
    micro_steps_left,
    mix,
    plan_epoch,
    plan_rest,
    sample_ids,
    strided,
)
from zero_data.position_loader import PositionLoader, kept, seed_everything

_log = logging.getLogger(__name__)

PAST_THE_EPOCH = (
    "the epoch has ended, and its last micro-steps await a step(); call step() at the end "
    "of each epoch: a step does not straddle two"
)
_LENGTH = (
    "the dataset has {} samples, and had {} when the run began: others would never be trained on, "
    "or not be there; give the changed dataset to a new run, or keep its length"
)
_AUGMENTATION = 1
"""Separates the seeds of data from those of dropout, which mix (seed, step, micro-batch)."""
_LOOP = 3
"""Separates those of what a script does between a batch and the engine's forward."""


@dataclass(kw_only=True)
class MicroBatchSampler:
    """The micro-batches of one rank, as tickets: an `Order`, and the loader's batch sampler."""

    dataset: Dataset[Any]
    """See `Order`, like what follows."""
    dataset_size: int
    epoch_size: int
    """The samples used per epoch: all, less the tail if it is dropped."""
    shuffle_key: int | None
    batch: BatchShape
    cursor: Cursor
    rank: int
    world: int
    seed: int
    managed: bool = True
    """Whether `batch` decides where steps end; otherwise the script does."""
    assignment: Assignment | None = None
    """Who runs which micro-batch, if `batch` decides; None: the default."""
    seeds_forward: bool = False
    """Whether nobody else seeds the forward: dropout goes on with the numbers of the loop."""
    until: int | None = None
    """The epoch with whose end an iteration ends; None: the one in which it begins."""

    @property
    def epoch(self) -> int:
        """See `Order`."""
        return self.cursor.samples // self.epoch_size

    def sizes(self) -> None:
        """All are full, but the last one of an epoch."""

    def expect(self, dataset_size: int) -> None:
        """Do nothing: the dataset has a length."""

    def leave_steps_to_script(self) -> bool:
        """Possible if there is no padding, so that samples come in one order."""
        if self.batch.microbatches % self.world == 0:
            self.managed = False
        return not self.managed

    def __len__(self) -> int:
        """Micro-batches from here to the end of the epoch."""
        position, begun = self.cursor.samples, self.cursor.micro
        if self.managed:
            return micro_steps_left(position, self.batch, self.epoch_size, self.world) - begun
        return self._rest().micro_steps(self.world) - begun

    def __iter__(self) -> Iterator[Ticket]:
        """The micro-batches from the committed position to the end of the epoch `until`.

        Raises:
            ZeroError: All of them have run, and the script has not ended the step.
        """
        micro = self.cursor.micro
        if not self.managed:
            # The step of a micro-batch is not known yet: its position in the run is its seed.
            if micro == self._rest().micro_steps(self.world):
                raise ZeroError(PAST_THE_EPOCH)
            for rest in self._rests():
                for each in range(micro, rest.micro_steps(self.world)):
                    microbatch = rest.microbatch(each, self.rank, self.world)
                    yield self._ticket(rest, microbatch, rest.position + microbatch.start, 0)
                micro = 0
            return
        assignment = self.assignment or strided(self.world)
        plans = plan_epoch(self.cursor.samples, self.batch, self.epoch_size, self.until)
        for step, plan in enumerate(plans, self.cursor.step):
            for each in range(micro, plan.micro_steps(self.world)):
                microbatch = plan.assigned(assignment, each, self.rank)
                ticket = self._ticket(plan, microbatch, step, microbatch.index)
                yield replace(ticket, ends_step=each + 1 == plan.micro_steps(self.world))
            micro = 0

    def _rests(self) -> Iterator[StepPlan]:
        """The rest of this epoch, and all of the following ones up to `until`."""
        yield self._rest()
        for epoch in range(self.epoch + 1, (self.until or 0) + 1):
            yield plan_rest(epoch * self.epoch_size, self.batch, self.epoch_size)

    def _rest(self) -> StepPlan:
        return plan_rest(self.cursor.samples, self.batch, self.epoch_size)

    def _ticket(self, plan: StepPlan, microbatch: MicroBatch, step: int, number: int) -> Ticket:
        ids = sample_ids(plan, microbatch, self.dataset_size, self.epoch_size, self.shuffle_key)
        seed = microbatch_seed(self.seed, step, number)
        # Where the loop's seed is that of dropout as well, it is the one that the engine gives it.
        of_loop = mix(self.seed, step, number) if self.seeds_forward else loop_seed(seed)
        return Ticket(plan.position + microbatch.start, tuple(ids), seed, of_loop)


def sampler_of(
    dataset: Dataset[Any],
    *,
    batch: BatchShape,
    cursor: Cursor,
    rank: int,
    world: int,
    seed: int,
    shuffle: bool,
    drop_last: bool,
    **options: Any,
) -> MicroBatchSampler:
    """One rank's micro-batches of a map-style dataset; rank 0 says what is left out.

    The options are those of `MicroBatchSampler`.

    Raises:
        ConfigError: The dataset has no length, is empty, or does not fill one batch.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"{type(dataset).__name__} has no length and no random access; give a map-style "
            "dataset, or pass it to initialize(training_data=...), which reads it in lanes"
        )
    size = len(dataset)
    epoch_size = size // batch.samples * batch.samples if drop_last else size
    if epoch_size == 0:
        raise ConfigError(
            f"training_data: {size} samples do not fill one global batch of {batch.samples}"
            if size
            else "training_data: the dataset is empty"
        )
    if rank == 0 and (tail := size - epoch_size):
        _log.warning(
            "drop_last leaves out %d of %d samples in each epoch: those that fill no global batch "
            "of %d, at every number of ranks; without it the last step of an epoch is smaller, and "
            "no sample is left out",
            tail,
            size,
            batch.samples,
        )
    return MicroBatchSampler(
        dataset=dataset,
        dataset_size=size,
        epoch_size=epoch_size,
        shuffle_key=seed if shuffle else None,
        batch=batch,
        cursor=cursor,
        rank=rank,
        world=world,
        seed=seed,
        **options,
    )


class ElasticLoader(PositionLoader[MicroBatchSampler]):
    """Iterates over the rest of the current epoch in this rank's micro-batches.

    Padding micro-batches are included: every rank gets equally many.
    """

    # Nothing that this class owns refers back to it: in a reference cycle the garbage collector
    # would delete the queues before the worker processes, and torch would wait 5 s for each.

    def __init__(
        self,
        sampler: MicroBatchSampler,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], object] | None = None,
        **of_workers: Any,
    ) -> None:
        """Load the batches of a sampler.

        Args:
            sampler: The batches.
            collate_fn: As for torch's DataLoader, as are the others.
            num_workers: The processes that load.
            pin_memory: Whether batches are copied to pinned memory.
            worker_init_fn: Called in each of those processes first, with its number.
            **of_workers: How those processes are started, and for how long they live: by default
                for one iteration, whose begin is where they get the dataset as it is then.
        """
        super().__init__(sampler, sampler.cursor, sampler.seed)
        self._loader: DataLoader[Any] = DataLoader(
            _Batches(sampler.dataset, collate_fn or default_collate),
            batch_sampler=sampler,  # type: ignore[arg-type]
            collate_fn=unchanged,
            num_workers=num_workers,
            pin_memory=pin_memory,
            worker_init_fn=BeginWorker(worker_init_fn),
            **of_workers,
        )

    def __len__(self) -> int:
        """The number of micro-batches that an iteration begun now yields."""
        return len(self.order) if self.epoch == self.order.epoch else 0

    def read(self, until: int) -> Iterator[tuple[Ticket, Any]]:
        """The batches from the position to the end of an epoch.

        Raises:
            ZeroError: The dataset has another length than before.
        """
        now, before = len(self.dataset), self.order.dataset_size
        if now != before:
            raise ZeroError(_LENGTH.format(now, before))
        self.order.until = until
        return iter(self._loader)

    def _look(self) -> int:
        """See `Feed`."""
        given = self._loader
        # The order of a run that begins, whatever the position is now.
        first = next(iter(replace(self.order, cursor=Cursor(), until=None)))
        loader = DataLoader(
            given.dataset,
            batch_sampler=[first],  # type: ignore[list-item]
            collate_fn=given.collate_fn,
            # In a process of its own where processes load: the dataset may open its files there.
            num_workers=min(given.num_workers, 1),
            worker_init_fn=given.worker_init_fn,
            multiprocessing_context=given.multiprocessing_context,
        )
        with kept():  # a DataLoader draws a seed, and loads here without processes
            ((_, batch),) = loader
        return fingerprint(batch)


def microbatch_seed(seed: int, step: int, microbatch: int) -> int:
    """The seed for the augmentation of one micro-batch."""
    return mix(seed, step, microbatch, _AUGMENTATION)


def loop_seed(seed: int) -> int:
    """The seed of what a script does with a micro-batch, from that of loading it."""
    return mix(seed, _LOOP)


class _Batches(Dataset[Any]):
    """Loads the batch of a ticket; its random state depends on the micro-batch alone."""

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any]) -> None:
        self.dataset = dataset
        self._collate_fn = collate_fn
        self._own: list[list[Generator]] | None = None
        """Generators of the dataset and of `collate_fn` themselves."""

    def __getitems__(self, ticket: Ticket) -> tuple[Ticket, Any]:
        if self._own is None:  # in the process that loads: the dataset there is a copy
            self._own = self._find()
            batch = self._load(ticket)
            before, self._own = self._own, self._find()
            # Some make a generator when they first read, one for each process: so, once more.
            if before == self._own:
                return ticket, batch
        return ticket, self._load(ticket)

    def _find(self) -> list[list[Generator]]:
        return [generators_of(self.dataset), generators_of(self._collate_fn)]

    def _load(self, ticket: Ticket) -> Any:
        assert self._own is not None
        of_dataset, of_collate = self._own
        seed_everything(ticket.seed)
        seed_generators(of_dataset, ticket.seed)
        if hasattr(self.dataset, "__getitems__"):
            samples = self.dataset.__getitems__(list(ticket.ids))
        else:
            samples = [self.dataset[number] for number in ticket.ids]
        seed_generators(of_collate, loop_seed(ticket.seed))
        return self._collate_fn(samples)


def unchanged(read: Any) -> Any:
    """What a loader has read; a function of a module, which processes that are spawned can get."""
    return read


@dataclass(frozen=True, slots=True)
class BeginWorker:
    """The begin of a loading process, in which `get_worker_info()` has the user's own dataset."""

    then: Callable[[int], object] | None

    def __call__(self, number: int) -> None:
        """See `worker_init_fn` of torch's DataLoader."""
        shield()
        info = get_worker_info()
        assert info is not None
        seeded: Any = info.dataset
        # torch's WorkerInfo refuses new values of its fields.
        object.__setattr__(info, "dataset", seeded.dataset)
        if self.then is not None:
            self.then(number)
