"""Iterable datasets: every rank reads the whole stream and keeps its own micro-batches.

Owns the way from a position in a stream to batches. Must always hold: the samples of a rank are a
function of the stream and the position, so every sample is consumed exactly once at every world
size; all ranks know the end of the stream in the same step, because each reads the whole global
batch before it yields a part of it. A position is found again by reading up to it, with the same
random numbers as before.

A stream must yield the same samples whenever it is begun for the same epoch; `set_epoch(epoch)`, if
the dataset has it, is called before. `shards` is for data that is too large for every rank to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate

from zero_contract.errors import ConfigError, ZeroError
from zero_data.draws import Ticket
from zero_data.elastic_loader import loop_seed, microbatch_seed
from zero_data.global_batch import Assignment, BatchShape, Cursor, StepPlan, mix, strided
from zero_data.position_loader import PositionLoader, seed_everything

_READING = 2
"""Separates the seeds of reading from those of augmentation and dropout."""

Item = tuple[Ticket | None, Any, int | None]
"""A ticket and its batch, or neither at the end; and the length of the stream if it is known."""


class StreamLoader(PositionLoader["StreamSteps"]):
    """Iterates over the rest of the stream's current epoch in this rank's micro-batches."""

    def __init__(self, steps: StreamSteps, *, workers: int, pin: bool) -> None:
        super().__init__(steps, steps.cursor)
        # One process reads ahead; more would each read the whole stream.
        self._workers, self._pin = min(workers, 1), pin

    def read(self, until: int) -> Iterator[tuple[Ticket, Any]]:
        """The batches from the position to the end of an epoch."""
        self.order.until = until
        items: Iterable[Item] = DataLoader(
            self.order,
            batch_size=None,
            collate_fn=_unchanged,  # type: ignore[arg-type] # typed for batches
            num_workers=self._workers,
            pin_memory=self._pin,
        )
        for ticket, batch, size in items:
            self.order.size = size or self.order.size
            if ticket is not None:
                yield ticket, batch


def _unchanged(item: Item) -> Item:
    return item


@dataclass(kw_only=True)
class StreamSteps(IterableDataset[Item]):
    """The micro-batches of one rank from the position to the end of the epoch: an `Order`."""

    dataset: Iterable[Any]
    batch: BatchShape
    rank: int
    world: int
    seed: int
    drop_last: bool
    collate: Callable[[list[Any]], Any] = default_collate
    size: int | None = None
    """Samples per epoch, once it is known."""
    cursor: Cursor = field(default_factory=Cursor)
    assignment: Assignment | None = None
    """Who runs which micro-batch; None: the default."""
    until: int = 0
    """The epoch with whose end an iteration ends."""

    @property
    def epoch(self) -> int:
        """See `Order`, like what follows."""
        return self.cursor.samples // self.size if self.size else 0

    @property
    def epoch_size(self) -> int | None:
        """Samples per epoch; None until the stream has ended once."""
        return self.size

    dataset_size = epoch_size

    def expect(self, dataset_size: int) -> None:
        """Take the length of the stream from a checkpoint."""
        self.size = dataset_size

    def leave_steps_to_script(self) -> bool:
        """Impossible: a stream is read one global batch at a time."""
        return False

    def __iter__(self) -> Iterator[Item]:
        step, position, micro = self.cursor.step, self.cursor.samples, self.cursor.micro
        epoch, read, samples = self._find(position)
        assignment = self.assignment or strided(self.world)
        while True:
            taken = self._take(samples, epoch, read, self.batch.samples)
            ended = len(taken) < self.batch.samples
            taken = [] if ended and self.drop_last else taken
            size = self._checked(read + len(taken), ended=ended)
            if not taken:
                yield None, None, size
            plan = StepPlan(position, len(taken), self.batch.micro_batch)
            for number in range(micro, plan.micro_steps(self.world)):
                microbatch = plan.assigned(assignment, number, self.rank)
                low, high = microbatch.start, microbatch.start + microbatch.size
                seed = microbatch_seed(self.seed, step, microbatch.index)
                ids = tuple(range(read + low, read + high))
                ticket = Ticket(plan.position + low, ids, seed, loop_seed(seed))
                seed_everything(seed)
                yield ticket, self.collate(taken[low:high]), size
            step, position, read = step + bool(taken), position + len(taken), read + len(taken)
            micro = 0
            if ended and epoch >= self.until:
                return
            if ended:
                epoch, read, samples = self._open(epoch + 1)

    def _open(self, epoch: int) -> tuple[int, int, Iterator[Any]]:
        """An epoch, the offset of its begin, and its samples."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        return epoch, 0, iter(self.dataset)

    def _find(self, position: int) -> tuple[int, int, Iterator[Any]]:
        """The epoch of a position, the offset in the epoch, and the samples from there on."""
        epoch, offset = divmod(position, self.size) if self.size else (0, position)
        epoch, read, samples = self._open(epoch)
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
        """The length of the stream: `read` if it has ended, otherwise the known one, if any.

        Raises:
            ConfigError: The stream is empty, or has less than one global batch.
            ZeroError: The epoch is longer or shorter than the one before.
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
