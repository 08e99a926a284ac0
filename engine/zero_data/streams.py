"""Datasets that can only be iterated: read whole by every rank, which keeps its own micro-batches.

Owns the way from a position in a stream to batches. Must always hold: what a rank is given is a
function of the stream and the position, so every sample is consumed exactly once at every world
size; where the stream ends, all ranks know in the same step, because each has read the whole
global batch before it hands out a part of it. A position is found again by reading up to it, with
the random numbers of the first time.

A stream must give the same samples, equally many, whenever it is begun for the same epoch;
`set_epoch(epoch)`, if it has that, is called before. `shards` is the way for data that is too much
for every rank to read. Made by `loaders`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate

from zero_contract.errors import ConfigError, ZeroError
from zero_data.elastic_loader import Ticket, microbatch_seed, seed_everything
from zero_data.global_batch import BatchShape, Cursor, StepPlan, mix

_READING = 2
"""Keeps the seeds of reading apart from those of augmentation and dropout."""

Item = tuple[Ticket | None, Any, int | None]
"""A ticket and its batch, or neither at the end; and the stream's length where it is known."""


class StreamLoader:
    """Iterates over the rest of the stream's current epoch in this rank's micro-batches."""

    def __init__(self, steps: StreamSteps, cursor: Cursor, *, workers: int, pin: bool) -> None:
        self._steps = steps
        self._cursor = cursor
        # One process reads ahead; more would each read the whole stream.
        self._workers, self._pin = min(workers, 1), pin
        self.last: Ticket | None = None
        """The batch handed out last."""

    @property
    def dataset(self) -> Iterable[Any]:
        """The user's dataset."""
        return self._steps.dataset

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to; counts from 0."""
        size = self._steps.size
        return self._cursor.samples // size if size else 0

    @property
    def epoch_size(self) -> int | None:
        """Samples per epoch; None until the stream has ended once."""
        return self._steps.size

    dataset_size = epoch_size

    def expect(self, dataset_size: int) -> None:
        """Hear from a checkpoint how long the stream is."""
        self._steps.size = dataset_size

    def adopt_batch(self, batch: BatchShape) -> None:
        """Go on with another global batch."""
        self._steps.batch = batch

    def leave_steps_to_script(self) -> bool:
        """Never: what can only be iterated is read a global batch at a time."""
        return False

    def __iter__(self) -> Iterator[Any]:
        cursor, batch_shape, epoch = self._cursor, self._steps.batch, self.epoch
        self._steps.begin = (cursor.step, cursor.samples, cursor.micro)
        items: Iterable[Item] = DataLoader(
            self._steps,
            batch_size=None,
            collate_fn=_as_it_is,  # type: ignore[arg-type] # typed for batches
            num_workers=self._workers,
            pin_memory=self._pin,
        )
        for ticket, batch, size in items:
            self._steps.size = size or self._steps.size
            if ticket is None:
                return
            self.last = ticket
            yield batch
            if self._steps.batch is not batch_shape:
                break
        else:
            return
        # Another batch size: go on from the position, unless the epoch ended there.
        if self.epoch == epoch:
            yield from self


def _as_it_is(item: Item) -> Item:
    return item


@dataclass(kw_only=True)
class StreamSteps(IterableDataset[Item]):
    """The micro-batches of one rank from `begin` to the end of the epoch."""

    dataset: Iterable[Any]
    batch: BatchShape
    rank: int
    world: int
    seed: int
    drop_last: bool
    collate: Callable[[list[Any]], Any] = default_collate
    size: int | None = None
    """Samples per epoch, once it is known."""
    begin: tuple[int, int, int] = (0, 0, 0)
    """Step, position and micro-step of the next batch."""

    def __iter__(self) -> Iterator[Item]:
        first, position, micro = self.begin
        epoch, read, samples = self._find(position)
        for step in count(first):
            taken = self._take(samples, epoch, read, self.batch.samples)
            ended = len(taken) < self.batch.samples
            taken = [] if ended and self.drop_last else taken
            size = self._checked(read + len(taken), ended=ended)
            if not taken:
                yield None, None, size
                return
            plan = StepPlan(position, len(taken), self.batch.micro_batch)
            for ticket in self._tickets(plan, step, micro, read):
                own = taken[ticket.ids[0] - read : ticket.ids[-1] + 1 - read]
                seed_everything(ticket.seed)
                yield ticket, self.collate(own), size
            position, read, micro = position + len(taken), read + len(taken), 0
            if ended:
                return

    def _tickets(self, plan: StepPlan, step: int, begun: int, read: int) -> Iterator[Ticket]:
        for micro in range(begun, plan.micro_steps(self.world)):
            microbatch = plan.microbatch(micro, self.rank, self.world)
            ids = range(read + microbatch.start, read + microbatch.start + microbatch.size)
            seed = microbatch_seed(self.seed, step, microbatch.index)
            yield Ticket(plan.position + microbatch.start, tuple(ids), seed)

    def _find(self, position: int) -> tuple[int, int, Iterator[Any]]:
        """The epoch of a position, how far into it that is, and the samples from there on."""
        epoch, offset = divmod(position, self.size) if self.size else (0, position)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        samples, read = iter(self.dataset), 0
        while read < offset:
            wanted = min(self.batch.samples, offset - read)
            taken = len(self._take(samples, epoch, read, wanted))
            read += taken
            if taken < wanted:  # the position is in a later epoch
                self.size = self._checked(read - taken * self.drop_last, ended=True)
                return self._find(position)
        return epoch, read, samples

    def _take(self, samples: Iterator[Any], epoch: int, read: int, wanted: int) -> list[Any]:
        seed_everything(mix(self.seed, epoch, read, _READING))
        return list(islice(samples, wanted))

    def _checked(self, read: int, *, ended: bool) -> int | None:
        """The length of the stream if it ends after `read` samples; what was known, otherwise.

        Raises:
            ConfigError: There is nothing in it, or not even one global batch.
            ZeroError: An epoch is longer or shorter than the one before.
        """
        if ended and read == 0:
            few = f"less than one global batch of {self.batch.samples} samples"
            raise ConfigError(f"training_data: {few if self.drop_last else 'the dataset is empty'}")
        if self.size is not None and (read > self.size or (ended and read < self.size)):
            raise ZeroError(
                f"training_data: this epoch has {'more' if read > self.size else read} samples, "
                f"the one before had {self.size}: a position in it would not be found again; "
                "give equally many in every epoch"
            )
        return read if ended else self.size
