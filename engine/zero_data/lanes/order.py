"""The order of samples of a run that reads lanes: which micro-batches a step has, and where it is.

Must always hold:

- Micro-batch i of a step comes from lane i, as long as that has samples: so the samples of a step,
  their weights and seeds depend on the lanes alone. A lane that has ended has an empty micro-batch.
- A rank holds the lanes of the micro-batches that it runs, the same ones in every step.
- All ranks know the sizes of all micro-batches of the step under way and of the one after it. They
  are told at the end of a step, with what ranks exchange there anyway, and at the begin of an
  iteration. So an epoch ends on all ranks at the same step.
- The state that is saved is that after the last sample of the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zero_contract.errors import ConfigError, ZeroError
from zero_data.global_batch import Assignment, BatchShape, Cursor, StepPlan, plan_step, strided
from zero_data.lanes.reading import Start

AHEAD = 2
"""Steps whose sizes are known while one is run: itself, and the one after it."""
_UNKNOWN = -1
_WORD = 8

Exchange = Callable[[Tensor], Tensor]
"""From this rank's [n] to those of all ranks [world, n], in int64. Collective."""
Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """The position before a step."""

    epoch: int
    numbers: tuple[int, ...]
    """Of each lane the samples of the epoch before it."""
    ended: tuple[bool, ...]
    """Of each lane whether it has no more."""
    starts: Mapping[int, Start]
    """Where the reading of this rank's lanes begins."""


class LaneOrder:
    """The micro-batches of one rank: an `Order` of `position_loader`."""

    def __init__(
        self,
        dataset: Any,
        *,
        batch: BatchShape,
        cursor: Cursor,
        rank: int,
        world: int,
        drop_last: bool = False,
        assignment: Assignment | None = None,
        exchange: Exchange,
    ) -> None:
        """Begin with the first epoch; see `MicroBatchSampler` for what is not said here."""
        self.dataset = dataset
        self.cursor = cursor
        self.rank = rank
        self.world = world
        self.assignment = assignment or strided(world)
        self.coming: Callable[[int], Sequence[int]] | None = None
        """The sizes of this rank's micro-batches in a step; None: nothing is read now."""
        self.row_bytes = 0
        """The room that a checkpoint has for the state of one lane, the same on all ranks."""
        self._batch = batch
        self._drop_last = drop_last
        self._exchange = exchange
        self._known: dict[int, Sizes] = {}
        self._marks = {cursor.step: self.beginning(0)}

    # ---- an `Order` ----

    @property
    def batch(self) -> BatchShape:
        """The global batch."""
        return self._batch

    @batch.setter
    def batch(self, batch: BatchShape) -> None:
        if batch == self._batch:
            return
        mark = self.mark()
        if mark.epoch or any(mark.numbers):
            raise ConfigError(
                f"a lane gives one micro-batch to each step, so a run with {self.lanes} lanes has "
                f"{self.lanes} micro-batches of {self._batch.micro_batch} in a step from its begin "
                f"to its end, and {batch.microbatches} of {batch.micro_batch} are wanted; keep the "
                "batch, or begin a new run"
            )
        self._batch = batch
        self._known.clear()
        self._marks = {self.cursor.step: self.beginning(0)}

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to; counts from 0."""
        return self.mark().epoch

    epoch_size: None = None
    dataset_size: None = None

    def expect(self, dataset_size: int) -> None:
        """Do nothing: nobody knows the number of samples."""

    def leave_steps_to_script(self) -> bool:
        """Impossible: a step has one micro-batch of each lane."""
        return False

    def sizes(self) -> Sizes:
        """The samples of each micro-batch of the current or next step, as far as known."""
        sizes = self._known.get(self.cursor.step)
        if sizes is None or self.ends(sizes):
            return (self._batch.micro_batch,) * self.lanes
        return sizes

    # ---- lanes ----

    @property
    def lanes(self) -> int:
        """Their number: one for each micro-batch of a step."""
        return self._batch.microbatches

    def own(self) -> list[int]:
        """This rank's micro-batch of each micro-step; from `lanes` on: padding."""
        steps = range(-(-self.lanes // self.world))
        return [self.assignment.number(micro, self.rank, self.lanes) for micro in steps]

    def beginning(self, epoch: int) -> Mark:
        """The begin of an epoch."""
        lanes = self.lanes
        starts = {lane: Start() for lane in self.own() if lane < lanes}
        return Mark(epoch, (0,) * lanes, (False,) * lanes, starts)

    def ends(self, sizes: Sizes) -> bool:
        """Whether a step of these sizes is not run: the epoch ends before it."""
        return not any(sizes) or (self._drop_last and sum(sizes) < self._batch.samples)

    def known(self, step: int) -> Sizes:
        """The sizes of a step. Raises ZeroError if they are not known yet."""
        if step not in self._known:
            raise ZeroError(
                f"a batch of step {step + 1} was drawn during step {self.cursor.step + 1}: how far "
                "lanes reach is known one step ahead; draw at most one step ahead"
            )
        return self._known[step]

    def mark(self) -> Mark:
        """The position of the run; at the end of an epoch that is the begin of the next one."""
        return self._settled(self.cursor.step)

    def _settled(self, step: int) -> Mark:
        """The mark before a step, after what is known of its sizes."""
        # Steps of another loader leave the lanes where they were.
        mark = self._marks[max(each for each in self._marks if each <= step)]
        sizes = self._known.get(step)
        if sizes is None:
            return mark
        if self.ends(sizes):
            return self.beginning(mark.epoch + 1)
        starts = {
            lane: start if sizes[lane] else replace(start, ended=True)
            for lane, start in mark.starts.items()
        }
        return Mark(mark.epoch, mark.numbers, tuple(not each for each in sizes), starts)

    def pass_step(self, step: int, starts: Mapping[int, Start]) -> None:
        """Note the position after a step, whose batches are about to be handed out."""
        mark, sizes = self._settled(step), self.known(step)
        numbers = tuple(n + size for n, size in zip(mark.numbers, sizes, strict=True))
        self._marks[step + 1] = Mark(mark.epoch, numbers, mark.ended, starts)
        # The mark of the cursor's own step stays: a checkpoint of it may come yet.
        for passed in (self._marks, self._known):
            for old in [each for each in passed if each < self.cursor.step]:
                del passed[old]

    def number_of(self, step: int, lane: int) -> int:
        """The samples that a lane has given in the epoch before a step that is handed out."""
        return self._marks[step].numbers[lane]

    def plan(self, step: int, position: int) -> StepPlan:
        """A step that begins at a position of the run."""
        return plan_step(position, self._batch, sizes=self.known(step))

    # ---- exchanges between ranks ----

    def meet(self) -> None:
        """Exchange the sizes of the first steps of an iteration. Collective."""
        first = self.cursor.step
        # What was known belongs to reads that are gone: lanes are read anew from the position.
        self._marks = {first: self._settled(first)}
        self._known.clear()
        own = [number for step in range(first, first + AHEAD) for number in self._of(step)]
        everybodys = self._exchange(torch.tensor(own, device="cpu")).tolist()
        notes = len(own) // AHEAD
        for step in range(AHEAD):
            self._hear(first + step, [row[step * notes : (step + 1) * notes] for row in everybodys])

    def notes(self) -> list[int]:
        """The numbers that this rank sends at the end of a step; equally many on all ranks."""
        return self._of(self.cursor.step + AHEAD)

    def hear(self, everybodys: Sequence[Sequence[float]]) -> None:
        """Take the `notes` of all ranks, before the step counts."""
        self._hear(self.cursor.step + AHEAD, everybodys)

    def _of(self, step: int) -> list[int]:
        unknown = [_UNKNOWN] * len(self.own())
        coming = unknown if self.coming is None else self.coming(step)
        starts = (start for mark in self._marks.values() for start in mark.starts.values())
        most = max((len(start.state) for start in starts if start.state is not None), default=0)
        # The room for the longest state, as the exponent of a power of two: it changes seldom.
        return [*coming, (most + 2 * _WORD).bit_length() if most else 0]

    def _hear(self, step: int, everybodys: Sequence[Sequence[float]]) -> None:
        room = max(int(row[-1]) for row in everybodys)
        self.row_bytes = max(self.row_bytes, 1 << room if room else 0)
        if any(_UNKNOWN in row[:-1] for row in everybodys):  # the loop has been left
            return
        places = (divmod(place, self.world) for place in self.assignment.places(self.lanes))
        self._known[step] = tuple(int(everybodys[rank][micro]) for micro, rank in places)

    # ---- checkpoints ----

    def record(self) -> dict[str, Any]:
        """The position as JSON, equal on all ranks."""
        mark = self.mark()
        return {
            "epoch": mark.epoch,
            "micro_batch": self._batch.micro_batch,
            "numbers": list(mark.numbers),
            "ended": [lane for lane, ended in enumerate(mark.ended) if ended],
        }

    def rows(self) -> dict[int, bytes]:
        """The states of this rank's lanes, each of `row_bytes`."""
        rows = {}
        for lane, start in self.mark().starts.items():
            state = start.state or b""
            head = (start.at, len(state)) if self.row_bytes else ()
            row = b"".join(number.to_bytes(_WORD, "little") for number in head) + state
            rows[lane] = row.ljust(self.row_bytes, b"\0")
        return rows

    def check(self, record: Mapping[str, Any] | None) -> None:
        """Check that lanes can go on from the `record` of a checkpoint.

        Raises:
            ConfigError: It has another number of lanes, or of samples in a micro-batch.
        """
        if record is None:
            return
        # Checkpoints of older versions do not have the size of a micro-batch.
        then = len(record["numbers"]), record.get("micro_batch", self._batch.micro_batch)
        if then != (self.lanes, self._batch.micro_batch):
            raise ConfigError(
                "the checkpoint has {} lanes, one for each micro-batch of a step, of {} samples, "
                "and this run has {} micro-batches of {} in a step; give it {} of {}, or begin a "
                "new run".format(*then, self.lanes, self._batch.micro_batch, *then)
            )

    def resume(self, record: Mapping[str, Any] | None, rows: Mapping[int, bytes]) -> None:
        """Go to the position of a checkpoint, to which the cursor has moved; None: to the begin.

        Raises:
            ConfigError: See `check`.
        """
        self.check(record)
        self._known.clear()
        if record is None:
            self._marks = {self.cursor.step: self.beginning(0)}
            return
        numbers, ended = record["numbers"], set(record["ended"])
        starts = {}
        for lane in self.beginning(0).starts:
            row = rows.get(lane, b"")
            at, size = (int.from_bytes(row[k : k + _WORD], "little") for k in (0, _WORD))
            # Without a state the lane is read from the begin of its epoch up to its number.
            state = row[2 * _WORD : 2 * _WORD + size] if size else None
            begin = at if state is not None else 0
            starts[lane] = Start(numbers[lane], begin, state, ended=lane in ended)
        self.row_bytes = max(map(len, rows.values()), default=0)
        flags = tuple(lane in ended for lane in range(self.lanes))
        self._marks = {self.cursor.step: Mark(record["epoch"], tuple(numbers), flags, starts)}
