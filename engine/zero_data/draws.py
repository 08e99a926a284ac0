"""The batches that a loop has drawn: which of them a micro-step runs.

A loop may draw ahead of what it runs, as prefetchers do. Owns the rule that holds for every loop:
batches are run in the order in which they are drawn. Must always hold: what was drawn and not run
belongs to no step; a new iteration begins before it, and a move of the position (a load) makes it
worthless, so that it is never trained as another batch.

Nobody can see which batch a script computes with. What gives a wrong order away is that more
batches wait than ever before in this iteration: then the loop has passed one over.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from zero_contract.errors import ZeroError
from zero_data.global_batch import Cursor
from zero_data.ledger import Documents

TWO_ITERATIONS = (
    "two iterations of one loader at the same time: each batch belongs to one micro-step; iterate "
    "over the loader once, and begin again when that iteration is left"
)
_OLD = (
    "this batch was drawn before the position of the run has changed, by a load or a drop of the "
    "step: its samples come again; draw the next batch after it"
)
_OLD_AHEAD = (
    "the position of the run has changed, by a load or another batch size, in a loop that draws "
    "{} ahead: what it has drawn is of the old position; leave the loop there, and begin a new "
    "iteration of the loader"
)
_NOT_RUN = (
    "the epoch has ended, and {} of its batches drawn and not trained: run every batch, also a bad "
    "one (with 0 * its loss), and the last ones that were drawn ahead before the next iteration"
)


@dataclass(frozen=True, slots=True)
class Ticket:
    """The position, the samples and the seed of a batch."""

    start: int
    """The position of its first sample in the run."""
    ids: tuple[int, ...]
    seed: int
    """Of loading it: of random augmentation."""
    loop_seed: int
    """Of what the script does with it."""
    documents: tuple[Documents, ...] = ()
    """What each sample is made of, if it is packed."""
    ends_step: bool = False
    """Whether it is the last one of its step on this rank; False where the script ends steps."""


class Draws:
    """Batches that one loader has handed out in its newest iteration, and that are not run yet."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._moves = cursor.moves
        self._waiting: deque[Ticket] = deque()
        self._depth: int | None = None
        """The most batches that wait when one is run; None: none was run in this iteration."""
        self._ended = False
        self._run_since = False
        """Whether a batch was run since then."""
        self.passed_over: Ticket | None = None
        """The batch that the last draw has shown to be left out."""

    @property
    def next(self) -> Ticket | None:
        """The batch that is run next, if it is drawn."""
        return self._waiting[0] if self.waiting else None

    @property
    def waiting(self) -> int:
        """Batches drawn and not run."""
        return len(self._waiting) if self._moves == self._cursor.moves else 0

    def begin(self) -> None:
        """Begin an iteration: what waits is drawn again.

        Raises:
            ZeroError: The loop has trained some batches up to the end of the epoch, but not all.
        """
        # A loop that ran no batch at all, or one since the end, has not passed its last ones over.
        whole = self._depth is None or self._run_since
        left = self.waiting if self._ended and not whole else 0
        self._forget()
        if left:
            raise ZeroError(_NOT_RUN.format("1 is" if left == 1 else f"{left} are"))

    def draw(self, ticket: Ticket, *, elsewhere: bool = False) -> None:
        """Note that a batch is handed out; `elsewhere`: to a thread that draws freely."""
        self._waiting.append(ticket)
        # More wait than ever before: the loop has passed the oldest one over.
        over = not elsewhere and self._depth is not None and len(self._waiting) > self._depth
        self.passed_over = self._waiting.popleft() if over else None

    def withdraw(self) -> None:
        """Note that the batch that was drawn last is not handed out."""
        self._waiting.pop()

    def end(self) -> None:
        """Note the end of the epoch; a loop that draws ahead has batches left to run."""
        self._ended, self._run_since = True, False

    def run(self) -> Ticket | None:
        """The batch that a micro-step runs now; None if none waits.

        Raises:
            ZeroError: It was drawn at another position.
        """
        if self._waiting and self._moves != self._cursor.moves:
            raise ZeroError(_OLD)
        self._depth = self._depth or max(1, len(self._waiting))
        self._run_since = True
        return self._waiting.popleft() if self._waiting else None

    def move(self) -> None:
        """Go on from where the run is now, in the middle of an iteration.

        Raises:
            ZeroError: The loop draws ahead, and would run what it has drawn before.
        """
        waiting, ahead = len(self._waiting), (self._depth or 1) - 1
        self._forget()
        if waiting > 1 or (waiting and ahead):
            raise ZeroError(_OLD_AHEAD.format(ahead or waiting - 1))

    def _forget(self) -> None:
        self._waiting.clear()
        self._depth, self._ended, self._moves = None, False, self._cursor.moves
