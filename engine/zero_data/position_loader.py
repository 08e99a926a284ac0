"""Loaders whose iterations follow the position of the run.

Must always hold: iterating reads the position and never moves it, whatever has been prefetched or
drawn ahead; only the end of a step moves it, and a load. An iteration begins at the position and
ends with the epoch. One that was not left when a checkpoint was made at the end of its epoch ends
once more where the run resumes: at once, so that what the script does behind it, such as the step
of a scheduler, is done. Where the position is moved meanwhile, the iteration goes on from there, up
to the end of the epoch that it would have ended with, so that a script that counts epochs counts
right. What the script does with a batch begins with random numbers of that batch alone: those of
torch, Python and numpy, with and without worker processes. In a loop that draws ahead it is the
batch that is run next, and not the one that is drawn. Where none is drawn, in the step of the
optimizer and between two steps, they follow from the number of the step: they are the same on all
ranks, and after a load. So they do behind the last backward of a step: noise on gradients.
"""

from __future__ import annotations

import logging
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from zero_contract.errors import ConfigError, ZeroError
from zero_data.draws import TWO_ITERATIONS, Draws, Ticket
from zero_data.fingerprint import fingerprint
from zero_data.generators import Generator, seed_generators
from zero_data.global_batch import BatchShape, Cursor, mix

_log = logging.getLogger(__name__)


class Moment(IntEnum):
    """Where no micro-batch is run, so that random numbers follow from the step."""

    OPTIMIZER = 1
    """The optimizer acts."""
    BETWEEN = 2
    """Between two steps."""
    GRADIENTS = 3
    """Behind the last backward of a step: its gradients are there."""


def seed_step(seed: int, cursor: Cursor, moment: Moment) -> None:
    """Begin the random numbers that follow from a step."""
    seed_everything(mix(mix(seed, cursor.step), moment))


def seed_everything(seed: int) -> None:
    """Seed the random numbers of torch, Python and numpy for one micro-batch.

    Raises:
        ConfigError: A CUDA graph is being captured: its replays would all have the same numbers.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            "a micro-batch begins within torch.cuda.graph: its random numbers have a seed of their "
            "own, which a captured graph would repeat in every replay; capture parts of the module "
            "(torch.cuda.make_graphed_callables, or torch.compile with mode='reduce-overhead'), "
            "and leave the loop over batches outside"
        )
    if torch.accelerator.current_accelerator() is None:
        # torch.manual_seed would write the stack down for each kind of device that may be used yet,
        # which is a third of the time of a small micro-batch.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


_FREE: list[np.random.MT19937] = []
"""What gives numpy's random numbers within `kept`: to copy their state, or to make another one,
takes 0.3 ms."""


@contextmanager
def kept() -> Iterator[None]:
    """Random numbers of torch on the CPU, Python and numpy are afterwards as before."""
    # But a normal number of which numpy has drawn two, and given one, is drawn anew: it is not in
    # the bit generator.
    numpy: Any = np.random  # exports more than its types say
    before = torch.random.get_rng_state(), random.getstate(), numpy.get_bit_generator()
    # One that nobody uses: within another `kept` the numbers of that are to be as before as well.
    try:
        own = _FREE.pop()
    except IndexError:
        own = np.random.MT19937()
    numpy.set_bit_generator(own)
    try:
        yield
    finally:
        torch.random.set_rng_state(before[0])
        random.setstate(before[1])
        numpy.set_bit_generator(before[2])
        _FREE.append(own)


class Order(Protocol):
    """The samples of a run, in micro-batches: what the engine asks of any kind of dataset."""

    rank: int
    batch: BatchShape
    """The global batch of the coming steps; a DataLoader of the script sees a change in its next
    iteration."""

    @property
    def dataset(self) -> Any:
        """The user's dataset."""

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to; counts from 0."""

    @property
    def epoch_size(self) -> int | None:
        """The samples used per epoch; None while unknown."""

    @property
    def dataset_size(self) -> int | None:
        """The samples in the dataset; None while unknown."""

    def sizes(self) -> tuple[int, ...] | None:
        """The samples of each micro-batch of the next step; None: `epoch_size` says it."""

    def expect(self, dataset_size: int) -> None:
        """Take the number of samples from a checkpoint."""

    def leave_steps_to_script(self) -> bool:
        """Let the script decide where steps end; returns False if that is impossible."""


class Feed(Protocol):
    """The source of a run's batches: the interface that the engine needs of any loader."""

    @property
    def order(self) -> Order:
        """Which samples its batches have."""

    @property
    def last(self) -> Ticket | None:
        """The ticket of the last batch that was drawn."""

    def run(self) -> Ticket | None:
        """The ticket of the batch that a micro-step runs now, if it is known."""

    def seed_step(self, moment: Moment = Moment.BETWEEN) -> None:
        """Begin the random numbers of a moment of a step.

        Between two steps: one has ended, or was loaded. Not for one of several trainings of
        a process: what follows may belong to the same micro-batch, as in a GAN.
        """

    comes_back: bool
    """Whether it hears, on this thread, where the loop comes back from the step under way."""

    known_as: int | None
    """The `fingerprint` of its data; None: no checkpoint has it, and the first micro-batch of the
    run was not handed out here."""

    def look(self) -> int | None:
        """Read the first micro-batch of the run, on rank 0, for its fingerprint; None: cannot."""


class LoopCalls(NamedTuple):
    """What the training does while the script is in a loop over its loader."""

    begin: Callable[[], object]
    """Before each iteration."""
    draw: Callable[[], object]
    """For each batch."""
    end: Callable[[], object]
    """At the end of an epoch."""


Ordered = TypeVar("Ordered", bound=Order)


class PositionLoader(ABC, Generic[Ordered]):
    """A loader of one run: a `Feed` whose batches are in `order`."""

    drawn: ClassVar[int] = 0
    """The seed of what the process does with the batch that a loop has drawn last; 0: none has."""

    def __init__(self, order: Ordered, cursor: Cursor, seed: int) -> None:
        self.order = order
        self._cursor = cursor
        self._of_run = seed
        self._newest = object()
        """Of the newest iteration."""
        self._iterates = False
        """Whether it is not left."""
        self._over: int | None = None
        """The epoch of the newest iteration; None before the first."""
        self._since = 0, False
        """The oldest state with what the script has done behind its loops over the epochs so far:
        its step, and whether it is from between two loops."""
        self._thread = threading.get_ident()
        self.draws = Draws(cursor)
        self.last: Ticket | None = None
        self.known_as: int | None = None
        self.of_loop: Sequence[Generator] = ()
        """Generators of the script that are seeded with those of the process."""
        self.is_alone: Callable[[], bool] = lambda: True
        """Whether it is the only training of the process."""
        self.calls = LoopCalls(*(lambda: None,) * 3)
        self.comes_back = False

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration is over; counts from 0."""
        epoch, loop = self.order.epoch, self._cursor.loop
        return epoch if loop is None or self._iterates else min(epoch, loop)

    @property
    def dataset(self) -> Any:
        """The user's dataset."""
        return self.order.dataset

    def leave(self) -> None:
        """Go on with the next epoch where a checkpoint was made at the end of one.

        For libraries, which count epochs themselves, and take one without a batch for an error.
        """
        self._cursor.loop = None

    def lacks(self, step: int | None = None) -> bool:
        """Whether a state is from before what the script has done behind a loop over an epoch.

        `step`: of a checkpoint that was made within a loop; None: the state that was loaded.
        """
        cursor = self._cursor
        at = (cursor.step, cursor.loop is None) if step is None else (step, False)
        return at < self._since

    @abstractmethod
    def read(self, until: int) -> Iterator[tuple[Ticket, Any]]:
        """The batches from the position to the end of an epoch."""

    def look(self) -> int | None:
        """See `Feed`; a sample that cannot be read fails where the run needs it, not here."""
        try:
            return self._look()
        except Exception as error:
            _log.debug("the data are not compared with those of the checkpoint: %r", error)
            return None

    @abstractmethod
    def _look(self) -> int | None: ...

    def note(self, ticket: Ticket, batch: Any) -> None:
        """Take the fingerprint of the data, if this is the first micro-batch of the run."""
        if ticket.start == 0 and ticket.ids and self.known_as is None:
            self.known_as = fingerprint(batch)

    @property
    def elsewhere(self) -> bool:
        """Whether this is another thread than the one that trains."""
        return threading.get_ident() != self._thread

    def run(self) -> Ticket | None:
        """The ticket of the batch that a micro-step runs now; None if no batch waits for one."""
        ticket = self.draws.run()
        # Perhaps no draw comes before what the script does with the next one.
        self._seed()
        return ticket

    def seed_step(self, moment: Moment = Moment.BETWEEN) -> None:
        """See `Feed`."""
        # With a batch that waits, the numbers are those of that batch.
        if self.is_alone() and not self.draws.waiting and not self.elsewhere:
            seed_step(self._of_run, self._cursor, moment)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch.

        Raises:
            ZeroError: A newer iteration has begun; or see `Draws`.
        """
        self.calls.begin()
        self.draws.begin()
        iteration = self._newest = object()
        until = self.epoch
        self._iterates, self._cursor.loop = True, until
        if until != self._over:
            self._over, self._since = until, max(self._since, (self._cursor.step, False))
        self.comes_back = not self.elsewhere
        try:
            for batch in self._until(until, iteration) if self.order.epoch == until else ():
                moves = self._cursor.moves
                self.calls.draw()
                if self._cursor.moves == moves:
                    yield batch
                else:  # the batch is of a position before
                    self.draws.withdraw()
            self._since = self._cursor.step, True
        finally:
            if self._newest is iteration:
                self._iterates, self._cursor.loop, self.comes_back = False, None, False
                PositionLoader.drawn = 0

    def _until(self, until: int, iteration: object) -> Iterator[Any]:
        """The batches of an iteration from the position to the end of an epoch."""
        while True:
            plan = self._cursor.moves, self.order.batch
            for ticket, batch in self.read(until):
                self.last = ticket
                self.note(ticket, batch)
                self.draws.draw(ticket, elsewhere=self.elsewhere)
                self._seed()
                yield batch
                if self._newest is not iteration:
                    raise ZeroError(TWO_ITERATIONS)
                if (self._cursor.moves, self.order.batch) != plan:
                    break
            else:
                self.draws.end()
                self._seed()
                self.calls.end()  # it may move the position back
                if self._cursor.moves == plan[0]:
                    return
            # Go on from the position: what was planned and prefetched is of another one.
            self.draws.move()
            self._cursor.loop = until
            if self.order.epoch > until:  # a script that counts epochs begins the next by itself
                return

    def _seed(self) -> None:
        """Begin the random numbers of what the script does with the next batch."""
        ticket = self.draws.next
        if ticket is not None and not self.elsewhere:  # where another batch may be run now
            PositionLoader.drawn = ticket.loop_seed
            seed_everything(ticket.loop_seed)
            seed_generators(self.of_loop, ticket.loop_seed)
