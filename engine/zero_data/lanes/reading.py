"""Lanes in a process that reads: the micro-batches of each, with a state where that is cheap.

Must always hold: the random numbers with which a micro-batch is read depend on the seed, the lane,
the epoch and its place in the lane alone, so what is read again is the same; what a lane reads does
not touch the random numbers of anybody else in the process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, repeat
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info

from zero_contract.errors import ConfigError
from zero_data.generators import Generator, generators_in_common, generators_of, seed_generators
from zero_data.global_batch import mix
from zero_data.lanes.adapters.place import ALONE, seed_process, seeded
from zero_data.lanes.packing import Packed
from zero_data.lanes.source import Reader, Source
from zero_data.lanes.stored import dump, load
from zero_data.ledger import Documents
from zero_data.position_loader import kept

_READING = 2
"""Separates the seeds of reading from those of augmentation and dropout."""
_PACE = 10
"""A state is taken after so many times the time that the last one took."""


class Read(NamedTuple):
    """One micro-batch of a lane, as it comes from the process that has read it."""

    size: int
    """Its samples; 0: the lane has ended."""
    batch: Any
    """Collated; None at the end."""
    state: bytes | None
    """The state of the reader after it; None: not taken, or it cannot say."""
    documents: tuple[Documents, ...] = ()
    """What each sample is made of, if it is packed."""


_END = Read(0, None, None)


@dataclass(frozen=True, slots=True)
class Start:
    """Where the reading of a lane begins."""

    number: int = 0
    """Samples of the epoch before it."""
    at: int = 0
    """Samples before the state, of which the reading of `number - at` begins again."""
    state: bytes | None = None
    """None: of the beginning."""
    ended: bool = False

    def after(self, read: Read) -> Start:
        """Where it is after a micro-batch."""
        number = self.number + read.size
        if read.state is None:
            return Start(number, self.at, self.state)
        return Start(number, number, read.state)


@dataclass(kw_only=True)
class Reading(IterableDataset[Read | None]):
    """Some lanes of one epoch, which take turns; None where nobody's turn is."""

    source: Source
    dataset: Any
    """The user's."""
    lanes: int
    starts: Mapping[int, Start]
    """Where each lane begins; lanes in the order of their turns."""
    epoch: int
    micro_batch: int | None
    """Samples of each micro-batch; None: readers give whole ones."""
    collate: Callable[[list[Any]], Any]
    seed: int
    _has_read: bool = field(default=False, init=False)
    _opened: dict[int, Reader] = field(default_factory=dict, init=False)
    """Lanes that have not begun to read."""

    def __iter__(self) -> Iterator[Read | None]:
        """Endless; of a process among several, the turns that fall to it."""
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        turns: list[Iterator[Read] | None] = [None] * -(-len(self.starts) // workers)
        for place, lane in enumerate([*self.starts][number::workers]):
            turns[place] = self.read(lane)
        while True:
            # Of a whole row: to enter these takes as long as to read a short sample.
            with ALONE, kept():
                row = [None if turn is None else next(turn) for turn in turns]
            yield from row

    def read(self, lane: int) -> Iterator[Read]:
        """The micro-batches of a lane, then the end for ever; within `kept`."""
        # Opened at once: lanes of a process can share what none of them has begun to read.
        if not self.starts[lane].ended:
            self._opened[lane] = self._open(lane)
        return self._rest(lane, self.starts[lane])

    @cached_property
    def _own(self) -> list[Generator]:
        """The generators that are seeded for each micro-batch."""
        # A dataset that is iterated has an order of its own, perhaps of its own generator.
        is_map = hasattr(self.dataset, "__len__") and not isinstance(self.dataset, IterableDataset)
        of_data = generators_of(self.dataset) if is_map else generators_in_common(self.source)
        return [*of_data, *generators_of(self.collate)]

    def _open(self, lane: int) -> Reader:
        # That of the first micro-batch that it reads: some draw when they begin.
        start = self.starts[lane]
        seed = mix(self.seed, self.epoch, lane, start.at, _READING)
        with seeded(seed):
            seed_generators(self._own, seed)
            state = None if start.state is None else load(start.state)
            return self.source.open(lane, self.lanes, self.epoch, state)

    def _rest(self, lane: int, start: Start) -> Iterator[Read]:
        if (reader := self._opened.pop(lane, None)) is None:
            yield from repeat(_END)
            return
        number, took_s, read_s = start.at, 0.0, 0.0
        while True:
            again, taken = number < start.number, None
            seed = mix(self.seed, self.epoch, lane, number, _READING)
            seed_process(seed)
            seed_generators(self._own, seed)
            begin_s = time.perf_counter()
            samples, batch = self._load(reader, collates=not again)
            read_s += time.perf_counter() - begin_s
            if samples and not again and not self._has_read:
                # Some make a generator when they first read. It is there from now on, but was not
                # when this micro-batch was read: so, once more.
                self._has_read, before = True, self._own
                del self._own  # in the process that reads: the dataset there is a copy
                if self._own != before:
                    # The others as well: some of them have drawn from it when they began.
                    self._opened |= {each: self._open(each) for each in (lane, *self._opened)}
                    number, reader = start.at, self._opened.pop(lane)
                    continue
            # So that states take at most a tenth of the time, however large they are.
            if samples and not again and read_s >= _PACE * took_s:
                begin_s = time.perf_counter()
                taken = _state_of(reader, self.dataset)
                took_s, read_s = time.perf_counter() - begin_s, 0.0
            number += len(samples)
            if not again:
                yield Read(len(samples), batch, taken, _documents(samples))
            # A micro-batch that is not full is the last one of the lane.
            if len(samples) < (self.micro_batch or 1):
                break
        if number < start.number:
            raise ConfigError(
                f"training_data: lane {lane} of {self.lanes} has ended after {number} samples in "
                f"epoch {self.epoch}, of which {start.number} were trained on before: it does not "
                "read the same again; give data whose order depends on its seed and the epoch alone"
            )
        yield from repeat(_END)

    def _load(self, reader: Reader, *, collates: bool) -> tuple[list[Any], Any]:
        size = self.micro_batch
        # What a dataset is told of its worker does not reach `collate`.
        with ALONE:
            samples: list[Any] = next(reader, []) if size is None else [*islice(reader, size)]
        return samples, self.collate(samples) if samples and collates else None


def _documents(samples: list[Any]) -> tuple[Documents, ...]:
    """The documents of each sample; empty if none is packed."""
    if Packed not in map(type, samples):
        return ()
    return tuple(each.documents if isinstance(each, Packed) else () for each in samples)


def _state_of(reader: Reader, dataset: Any) -> bytes | None:
    state = reader.state()
    try:
        return None if state is None else dump(state)
    except ConfigError as error:
        raise ConfigError(
            f"training_data: the state of {type(dataset).__name__} cannot be stored: {error}"
        ) from None
