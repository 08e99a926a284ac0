"""The global batch: which rank runs which samples of which step, as pure functions.

Owns the arithmetic from (position, batch, world) to sample ids and seeds. Must always hold:

- A step is cut into micro-batches of a fixed size. Which samples a micro-batch holds, its
  weight and its random seeds depend on the step and the micro-batch, never on rank or world.
- An `Assignment` gives every micro-batch to one rank and micro-step: by default micro-batch s *
  world + r to rank r at micro-step s. A number past the last micro-batch is a *padding
  micro-batch*: the rank runs the last micro-batch again and joins the collectives, but is not
  summed. So every world size works, with no divisibility rule.
- A step never straddles two epochs: the last step of an epoch is shorter. Nothing is dropped,
  padded or repeated.

`elastic_loader` walks the plans, `engine` weights the losses with them.

Source of the idea: fixed virtual workers (VirtualFlow, arXiv 2009.09523; EasyScale, arXiv
2208.14228).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from zero_contract.errors import ConfigError

_MASK = (1 << 64) - 1
_FEISTEL_ROUNDS = 6
_ENDLESS = 1 << 62


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchShape:
    """The global batch: `microbatches` micro-batches of `micro_batch` samples."""

    microbatches: int
    micro_batch: int

    @property
    def samples(self) -> int:
        """Samples in a full step: DeepSpeed's train_batch_size."""
        return self.microbatches * self.micro_batch


@dataclass(slots=True)
class Cursor:
    """Where the run is: the one mutable record, advanced by the engine alone.

    A checkpoint is taken between steps, where `micro` is 0, and holds the rest.
    """

    step: int = 0
    """Optimizer steps ended, skipped ones included."""
    samples: int = 0
    """Samples consumed by those steps since the run began."""
    micro: int = 0
    """Micro-steps of the current step that have ended on this rank."""
    skipped: int = 0
    """Steps whose gradients were not finite: the data were consumed, the weights not changed."""
    tokens: int = 0
    """Tokens of those steps, as far as the script has counted them."""
    moves: int = 0
    """How often it jumped, as a load does: loaders that are iterated follow it there."""
    loop: int | None = None
    """The epoch that the script's loop is over, or was when the loaded checkpoint was made; None:
    the script is between two such loops."""

    def move(self, *, step: int, samples: int) -> None:
        """Go to the begin of another step, or back to that of this one."""
        self.step, self.samples, self.micro = step, samples, 0
        self.moves += 1


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A rank's share of one micro-step: `size` samples from `start` of its step."""

    index: int
    start: int
    size: int
    padding: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Who runs which micro-batch when; it changes no sum, only where the sum is formed.

    Groups of ranks take turns: each takes as many consecutive micro-batches as it runs in so many
    micro-steps, its ranks one after the other. What is left for the last turn is shared likewise.
    Two groups of two, turns of 2, 8 micro-batches: ranks 0 and 1 run 0 and 1, then 2 and 3; ranks 2
    and 3 run 4 and 5, then 6 and 7.
    """

    groups: tuple[int, ...]
    """Ranks of each; those of a group are consecutive."""
    turn: int
    """Micro-steps; a turn ends with the step at the latest."""

    @property
    def world(self) -> int:
        """Ranks."""
        return sum(self.groups)

    def number(self, micro: int, rank: int, micro_batches: int) -> int:
        """Micro-batch of `rank` at this micro-step; past the last one, a padding micro-batch."""
        for numbers in self._by_group(micro, micro_batches):
            if rank < len(numbers):
                return numbers[rank]
            rank -= len(numbers)  # from here on within the groups that are left
        raise ValueError(f"no rank has a number from {self.world} on")

    def rows(self, micro_batches: int) -> list[list[int | None]]:
        """For each micro-step what each rank runs; None: a padding micro-batch."""
        return [
            [
                number if number < micro_batches else None
                for numbers in self._by_group(micro, micro_batches)
                for number in numbers
            ]
            for micro in range(-(-micro_batches // self.world))
        ]

    def places(self, micro_batches: int) -> list[int]:
        """Where each micro-batch is run: its micro-step * world + its rank."""
        numbers = [number for row in self.rows(micro_batches) for number in row]
        places = {number: place for place, number in enumerate(numbers) if number is not None}
        return [places[number] for number in range(micro_batches)]

    def _by_group(self, micro: int, micro_batches: int) -> Iterator[range]:
        """The micro-batches of each group's ranks at this micro-step."""
        turns, within = divmod(micro, self.turn)
        begin = turns * self.turn * self.world
        # The last turn is shorter: as long as what is left needs.
        length = min(self.turn, -(-(micro_batches - begin) // self.world))
        for group in self.groups:
            first = begin + within * group
            yield range(first, first + group)
            begin += length * group


def strided(world: int) -> Assignment:
    """The default: ranks one after the other, in every micro-step."""
    return Assignment(groups=(world,), turn=1)


def node_turns(nodes: Sequence[int], block: int) -> Assignment:
    """Nodes take blocks in turn, for sums that are formed before they travel between nodes.

    A turn is a block of each node where its ranks divide one; else about one of the largest.
    """
    return Assignment(groups=tuple(nodes), turn=max(1, block // max(nodes)))


def contiguous(world: int) -> Assignment:
    """Each rank runs consecutive ones, for sums that are formed by each rank on its own."""
    return Assignment(groups=(1,) * world, turn=_ENDLESS)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: `samples` samples from `position` on, in micro-batches of `micro_batch`."""

    position: int
    samples: int
    micro_batch: int
    weighed_as: int | None = None
    """The weight of a micro-batch is its share of so many samples; None: of those of the step."""
    sizes: tuple[int, ...] | None = None
    """Samples of each micro-batch, 0: it is run as padding, and its gradient counts as zero; None:
    all are full but the last."""

    @property
    def base(self) -> int:
        """Samples that weights are relative to."""
        return self.samples if self.weighed_as is None else self.weighed_as

    @property
    def microbatches(self) -> int:
        """Number of micro-batches; the last one may be smaller."""
        return -(-self.samples // self.micro_batch) if self.sizes is None else len(self.sizes)

    def micro_steps(self, world: int) -> int:
        """Micro-steps that every rank runs."""
        return -(-self.microbatches // world)

    def live(self, micro: int, world: int) -> int:
        """Micro-batches of this micro-step; by default those of ranks [0, live)."""
        return min(world, self.microbatches - micro * world)

    def microbatch(self, micro: int, rank: int, world: int) -> MicroBatch:
        """The micro-batch of `rank` at this micro-step by the default assignment."""
        return self.assigned(strided(world), micro, rank)

    def assigned(self, assignment: Assignment, micro: int, rank: int) -> MicroBatch:
        """The micro-batch of `rank` at this micro-step."""
        number = assignment.number(micro, rank, self.microbatches)
        index = min(number, self.microbatches - 1)
        if self.sizes is not None:
            padding = number != index or not self.sizes[index]
            return MicroBatch(
                index, sum(self.sizes[:index]), 0 if padding else self.sizes[index], padding
            )
        start = index * self.micro_batch
        size = min(self.micro_batch, self.samples - start)
        return MicroBatch(index, start, size, padding=number >= self.microbatches)

    def first_place(self, assignment: Assignment) -> tuple[int, int]:
        """Micro-step and rank that run the first micro-batch with samples."""
        if not self.sizes or self.sizes[0]:
            return 0, 0
        first = next(number for number, size in enumerate(self.sizes) if size)
        return divmod(assignment.places(len(self.sizes))[first], assignment.world)

    def weight(self, microbatch: MicroBatch) -> float:
        """The share of a micro-batch's mean loss in the mean loss of the step."""
        return microbatch.size / self.base

    def first(self, micro_steps: int, world: int) -> StepPlan:
        """The part of it that so many micro-steps run."""
        samples = min(self.samples, micro_steps * world * self.micro_batch)
        return replace(self, samples=samples)


def plan_step(
    position: int,
    batch: BatchShape,
    epoch_size: int | None = None,
    sizes: tuple[int, ...] | None = None,
) -> StepPlan:
    """The step that starts at `position`; without epoch size and `sizes` every step is full."""
    if sizes is not None:
        return StepPlan(position, sum(sizes), batch.micro_batch, sizes=sizes)
    samples = batch.samples
    if epoch_size is not None:
        samples = min(samples, epoch_size - position % epoch_size)
    return StepPlan(position, samples, batch.micro_batch)


def plan_rest(position: int, batch: BatchShape, epoch_size: int | None = None) -> StepPlan:
    """All from `position` to the end of its epoch: the script decides how much of it is a step.

    Weights are those of a step of `batch`.
    """
    samples = _ENDLESS if epoch_size is None else epoch_size - position % epoch_size
    return StepPlan(position, samples, batch.micro_batch, weighed_as=batch.samples)


def plan_epoch(
    position: int, batch: BatchShape, epoch_size: int, until: int | None = None
) -> Iterator[StepPlan]:
    """The steps from `position` to the end of epoch `until`; None: the one that it is in."""
    end = ((position // epoch_size if until is None else until) + 1) * epoch_size
    while position < end:
        plan = plan_step(position, batch, epoch_size)
        yield plan
        position += plan.samples


def micro_steps_left(position: int, batch: BatchShape, epoch_size: int, world: int) -> int:
    """Micro-steps of the steps from `position` to the end of its epoch."""
    left = epoch_size - position % epoch_size
    full, tail = divmod(left, batch.samples)
    whole, last = (StepPlan(0, samples, batch.micro_batch) for samples in (batch.samples, tail))
    return full * whole.micro_steps(world) + last.micro_steps(world)


def resolve_batch(
    train_batch: int | None,
    micro_batch: int | None,
    accumulation: int | None,
    world: int,
    *,
    first_round: bool,
) -> tuple[BatchShape, bool]:
    """The batch that the three DeepSpeed numbers describe, and whether it depends on the world.

    A batch that depends on the world is fixed by the first round and then kept through the
    checkpoint.

    Raises:
        ConfigError: The numbers do not describe a batch.
    """
    if train_batch is not None and micro_batch is not None:
        product = micro_batch * (accumulation or 1) * world
        # `accumulation` follows from the others: it must fit in the first round, as in DeepSpeed.
        # Later rounds may have another world, in which the three numbers cannot all hold.
        if first_round and accumulation is not None and train_batch != product:
            raise ConfigError(
                "train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * "
                f"world_size: {train_batch} != {micro_batch} * {accumulation} * {world}; leave "
                "out gradient_accumulation_steps, which follows from the others at every world size"
            )
        microbatches = _divide(train_batch, micro_batch, "train_micro_batch_size_per_gpu")
        return BatchShape(microbatches=microbatches, micro_batch=micro_batch), False
    microbatches = (accumulation or 1) * world
    if train_batch is not None:
        factors = f"gradient_accumulation_steps * world ({accumulation or 1} * {world})"
        return BatchShape(
            microbatches=microbatches, micro_batch=_divide(train_batch, microbatches, factors)
        ), True
    if micro_batch is not None:
        return BatchShape(microbatches=microbatches, micro_batch=micro_batch), True
    raise ConfigError(
        "the config gives no batch size: set train_batch_size and train_micro_batch_size_per_gpu"
    )


def _divide(train_batch: int, divisor: int, name: str) -> int:
    if train_batch % divisor:
        raise ConfigError(
            f"train_batch_size {train_batch} is not a multiple of {name} {divisor}; "
            f"the nearest that is: {max(1, round(train_batch / divisor)) * divisor}"
        )
    return train_batch // divisor


# ---- seeds and sample order: stable forever, checkpoints and ledgers depend on them ----


def mix(*numbers: int) -> int:
    """A 64-bit hash of some integers, by chained splitmix64 finalizers (Steele et al., 2014)."""
    state = 0
    for number in numbers:
        z = ((state ^ (number & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        state = z ^ (z >> 31)
    return state


def permute(offsets: npt.NDArray[np.int64], size: int, *key: int) -> npt.NDArray[np.int64]:
    """The images of `offsets` under the permutation of [0, size) that `key` names.

    Source: Luby and Rackoff (1988); cycle walking from Black and Rogaway (CT-RSA 2002).
    """
    # A Feistel network over the smallest power of two that holds `size`, with cycle walking for
    # what falls outside: any part of a shuffled epoch in O(1) memory.
    values = offsets.astype(np.uint64)
    bits = max(2, (size - 1).bit_length())
    keys = [mix(*key, round_) for round_ in range(_FEISTEL_ROUNDS)]
    # The two halves trade places each round; with an odd number of bits they differ in width,
    # and an even number of rounds brings the widths back to where they were.
    left_bits, right_bits = bits // 2, bits - bits // 2
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        left = values[outside] >> np.uint64(right_bits)
        right = values[outside] & np.uint64((1 << right_bits) - 1)
        for each in keys:
            z = right + np.uint64(each)  # and scrambled as `mix` does
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            z ^= z >> np.uint64(31)
            left, right = right, left ^ (z & np.uint64((1 << left_bits) - 1))
            left_bits, right_bits = right_bits, left_bits
        values[outside] = (left << np.uint64(right_bits)) | right
        outside = values >= size
    return values.astype(np.int64)


def sample_ids(
    plan: StepPlan, microbatch: MicroBatch, dataset_size: int, epoch_size: int, key: int | None
) -> list[int]:
    """The samples of one micro-batch. `key`: the seed of the shuffle; None keeps the order.

    `epoch_size` < `dataset_size` when the tail of every epoch is dropped.
    """
    # The shuffle is one of the whole dataset: a dropped tail has other samples in each epoch.
    epoch, offset = divmod(plan.position, epoch_size)
    first = offset + microbatch.start
    offsets = np.arange(first, first + microbatch.size, dtype=np.int64)
    ids = offsets if key is None else permute(offsets, dataset_size, key, epoch)
    return [int(i) for i in ids]
