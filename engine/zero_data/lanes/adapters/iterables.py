"""Iterables, which lanes read in parts: each part is one iteration of a copy of the dataset.

Must always hold: every sample of an epoch is in one part, at one place; a lane has every n-th
sample of its part, and all samples where no other lane shares the part. A dataset that does not
divide itself is one part, which the lanes of a process read together, once.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from zero_contract.errors import ConfigError, ZeroError
from zero_data.generators import Generator, generators_in_common, kept_generators, seed_generators
from zero_data.global_batch import mix
from zero_data.lanes.adapters.libraries import Library, library_of
from zero_data.lanes.adapters.place import ALONE, Worker, seed_process, seeded
from zero_data.lanes.source import Reader

_log = logging.getLogger(__name__)

_STATES = (("state_dict", "load_state_dict"), ("get_state", "set_state"))
"""The names by which datasets and iterators give and take their state."""
_FEW = (
    "%s has %d part%s for %d lanes: lanes share a part, which each process that reads it reads "
    "whole; give more files, or divide the data by torch.utils.data.get_worker_info()"
)
_AGAIN = "%s has no whole state: %d samples of epoch %d are read again"
_LATE = (
    "training_data: {} divides itself by torch.utils.data.get_worker_info(), but not before its "
    "first sample, so lanes have taken it for data that does not; ask at the begin of __iter__()"
)


class Iterables:
    """An iterable, or a function that makes one for (part, parts)."""

    def __init__(self, dataset: Any) -> None:
        """Read a dataset. Raises ConfigError if it is divided already."""
        self._dataset = dataset
        self._library = library_of(dataset)
        self._library.check(dataset)
        self._divides: bool | None = None
        """Whether the dataset divides itself, where only trying can tell."""
        self._shared: WeakValueDictionary[tuple[int, int], _Shared] = WeakValueDictionary()
        self._said = False

    def __reduce__(self) -> Any:
        # Weak references cannot be pickled, and no other process shares what this one reads.
        return Iterables, (self._dataset,)

    def open(self, lane: int, lanes: int, epoch: int, state: dict[str, Any] | None) -> Reader:
        """See `Source`."""
        parts = self._parts(lanes, epoch) if state is None else state["parts"]
        if lane == epoch == 0 and not self._said:  # one process of the job opens this lane
            self._said = True
            if parts < lanes:
                _log.warning(_FEW, type(self._dataset).__name__, parts, "s"[parts == 1 :], lanes)
            if remark := self._library.remark(self._dataset):
                _log.warning("%s", remark)
        if parts == lanes:
            inner = None if state is None else state["stream"]
            return _Whole(self._stream(lane, lanes, epoch, inner), parts)
        offset, part = divmod(lane, parts)
        at, inner = (0, None) if state is None else (state["at"], state["stream"])
        if lane == 0 and at and inner is None:
            _log.warning(_AGAIN, type(self._dataset).__name__, at, epoch)
        shared = self._shared.get((epoch, part))
        if shared is None or not shared.joins(offset, at, inner):
            begin = partial(self._stream, part, parts, epoch)
            tried = self._library.parts(self._dataset, lanes) is None
            stride = len(range(part, lanes, parts))
            # Those of now: some are made when a first sample is read.
            seed = partial(_seed, generators_in_common(self._dataset))
            shared = _Shared(begin, stride, epoch, seed, whole=tried)
            shared.joins(offset, at, inner)
            self._shared[epoch, part] = shared
        return _Strided(shared, offset, parts)

    def _parts(self, lanes: int, epoch: int) -> int:
        parts = self._library.parts(self._dataset, lanes) if lanes > 1 else 1
        if parts is None and self._divides is None:
            # A copy is tried, and the random numbers are those of before: no lane misses anything.
            with seeded(0), kept_generators(generators_in_common(self._dataset)):
                tried = self._stream(0, lanes, epoch, None)
                next(iter(tried), None)
            self._divides = tried.worker.asked
        return parts or (lanes if self._divides else 1)

    def _stream(self, part: int, parts: int, epoch: int, state: Any) -> _Stream:
        # A function has told its dataset already; as a worker it would be divided once more.
        alone = not isinstance(self._dataset, Iterable)
        return _Stream(self._dataset, self._library, Worker(part, parts, epoch, alone=alone), state)


def _seed(common: list[Generator], seed: int) -> None:
    """Seed the process, and the generators that are not those of one copy."""
    seed_process(seed)
    seed_generators(common, seed)


class _Stream(Iterator[Any]):
    """One iteration of a copy of a dataset, as one part of several."""

    def __init__(self, dataset: Any, library: Library, worker: Worker, state: Any) -> None:
        lossy = library.lossy(dataset)
        self.name = type(dataset).__name__
        self.worker = worker
        with worker:
            if isinstance(dataset, Iterable):
                own = library.part(_own(dataset), worker.number, worker.workers, worker.epoch)
            else:
                own = dataset(worker.number, worker.workers)
            worker.dataset = own
            given = None if state is None else _names(own)
            if given:
                getattr(own, given[1])(state)
            self._samples = iter(own)
            # Where the dataset takes none, it is the state of an iterator.
            if given == ():
                self._restore(state)
            holder = own if _names(own) else self._samples
            save, _ = _names(holder) or ("", "")
            self._save = None if lossy or not save else getattr(holder, save)

    def _restore(self, state: Any) -> None:
        names = _names(self._samples)
        if not names:
            raise ConfigError(
                f"training_data: the checkpoint has a state of its data, and {self.name} takes "
                "none; give the data that it was made with, or begin a new run"
            )
        getattr(self._samples, names[1])(state)

    def __next__(self) -> Any:
        # To enter once more takes longer than to read a short sample.
        if ALONE.is_here():
            self.worker.tell()
            return next(self._samples)
        with self.worker:
            return next(self._samples)

    def state(self) -> Any:
        """The state of the dataset, or else of the iterator; None: there is none."""
        if self._save is None:
            return None
        with self.worker:
            return self._save()


def _names(holder: Any) -> tuple[str, ...]:
    """The names of its state, if it has one."""
    return next((names for names in _STATES if all(hasattr(holder, n) for n in names)), ())


def _own(dataset: Any) -> Any:
    """A copy for one lane, as each loading process has one."""
    try:
        return copy.deepcopy(dataset)
    except Exception as error:
        raise ConfigError(
            f"training_data: {type(dataset).__name__} cannot be copied ({error}), and each lane "
            "reads a copy, as each process of a DataLoader does; open files in __iter__()"
        ) from error


@dataclass(frozen=True, slots=True)
class _Whole(Iterator[Any]):
    """A lane that has a part of its own."""

    _stream: _Stream
    _parts: int

    def __next__(self) -> Any:
        return next(self._stream)

    def state(self) -> dict[str, Any] | None:
        """See `Reader`."""
        inner = self._stream.state()
        return None if inner is None else {"parts": self._parts, "stream": inner}


class _Shared:
    """A part that lanes of this process read together; each keeps every n-th sample."""

    def __init__(
        self,
        begin: Callable[[Any], _Stream],
        stride: int,
        epoch: int,
        seed: Callable[[int], None],
        *,
        whole: bool,
    ) -> None:
        self._begin, self._stride, self._epoch, self._seed = begin, stride, epoch, seed
        self._whole = whole
        """Whether the dataset must not divide itself."""
        self._stream: _Stream | None = None
        self._state: Any = None
        """Where the stream begins."""
        self.at = 0
        """Samples that are read."""
        self._since: dict[int, int] = {}
        """From where on each lane keeps its samples."""
        self.waiting: dict[int, deque[Any]] = {}

    def joins(self, offset: int, at: int, state: Any) -> bool:
        """Take a lane in that has read up to `at`, if nothing of what it needs has passed."""
        if offset in self._since or (self._stream is not None and self.at > at):
            return False
        if not self._since or at < self.at:
            self.at, self._state = at, state
        self._since[offset] = at
        self.waiting[offset] = deque()
        return True

    def take(self, offset: int) -> Any:
        """The next sample of a lane."""
        waiting = self.waiting[offset]
        if self._stream is None:
            self._stream = self._start()
        while not waiting:
            sample = self._read(self._stream, self.at)
            of = self.at % self._stride
            if of in self._since and self.at >= self._since[of]:
                self.waiting[of].append(sample)
            self.at += 1
        return waiting.popleft()

    def _start(self) -> _Stream:
        # Every process must see the same samples, whichever lane begins: some draw in `__iter__`.
        self._seed(mix(self._epoch, 0, 1))
        stream = self._begin(self._state)
        if self._state is None and self.at:
            try:
                for number in range(self.at):
                    self._read(stream, number)
            except StopIteration:
                raise ZeroError(
                    f"training_data: {stream.name} has ended in epoch {self._epoch} before sample "
                    f"{self.at}, up to which it was trained on before: it does not read the same "
                    "again; give data whose order depends on its seed and the epoch alone"
                ) from None
        return stream

    def _read(self, stream: _Stream, number: int) -> Any:
        self._seed(mix(self._epoch, number))  # whichever lanes this process has
        sample = next(stream)
        if self._whole and stream.worker.asked:
            raise ZeroError(_LATE.format(stream.name))
        return sample

    def state(self) -> Any:
        """Of the stream, after `at` samples."""
        return self._state if self._stream is None else self._stream.state()


@dataclass(frozen=True, slots=True)
class _Strided(Iterator[Any]):
    """A lane that shares its part with others."""

    _shared: _Shared
    _offset: int
    _parts: int

    def __next__(self) -> Any:
        return self._shared.take(self._offset)

    def state(self) -> dict[str, Any] | None:
        """See `Reader`; where the stream has none, it is read again up to its place."""
        if self._shared.waiting[self._offset]:
            return None
        return {"parts": self._parts, "at": self._shared.at, "stream": self._shared.state()}
