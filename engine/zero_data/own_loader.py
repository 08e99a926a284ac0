"""The engine's order of samples for a DataLoader of the script.

Must always hold: an iteration begins at the committed position and ends with the epoch, like that
of the engine's loader; batches that were prefetched and not run are yielded again.

It cannot know which batch the script really ran: the ledger has the samples of the order. It cannot
call back what the DataLoader has prefetched either: where the position is moved, by a load, the
iteration under way ends with an error.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import Sampler

from zero_contract.errors import ZeroError
from zero_data.draws import Ticket
from zero_data.elastic_loader import MicroBatchSampler
from zero_data.position_loader import Moment, seed_step

_MOVED = (
    "the position of the run has changed, by a load, while your DataLoader is iterated, which has "
    "prefetched batches of the old position; leave the loop after load_checkpoint(), and begin a "
    "new one"
)


class MicroBatches(Sampler[list[int]]):
    """This rank's micro-batches as lists of indices: `DataLoader(batch_sampler=...)`."""

    def __init__(self, sampler: MicroBatchSampler) -> None:
        self.order = sampler
        self._moves: int | None = None
        """Those of the position when the newest iteration began."""

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to; counts from 0."""
        return self.order.epoch

    def __len__(self) -> int:
        """The number of micro-batches that an iteration begun now yields."""
        return len(self.order)

    def __iter__(self) -> Iterator[list[int]]:
        self._moves = self.order.cursor.moves
        for ticket in self.order:
            self._check()
            yield list(ticket.ids)

    def _check(self) -> None:
        if self._moves not in (None, self.order.cursor.moves):
            raise ZeroError(_MOVED)

    def run(self) -> Ticket | None:
        """The ticket of the micro-batch that is run now.

        Raises:
            ZeroError: It was drawn before the position was moved.
        """
        self._check()
        return self.last

    def seed_step(self, moment: Moment = Moment.BETWEEN) -> None:
        """See `Feed`."""
        seed_step(self.order.seed, self.order.cursor, moment)

    known_as: int | None = None
    comes_back = False

    def look(self) -> None:
        """Nothing: the script collates the samples."""

    @property
    def last(self) -> Ticket | None:
        """The ticket of the micro-batch that is to be run now."""
        return next(iter(self.order), None)
