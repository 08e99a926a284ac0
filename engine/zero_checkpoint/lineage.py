"""One engine's checkpoints as one line, on disk and in memory: what is saved later counts as newer.

Checkpoints are ordered by the round in their names, then by the step. Who goes back, to a tag or
because the newest is damaged, saves steps again that are there already, under a higher round; from
then on nothing is named with a lower one, wherever it is kept.

Shared by `saver` and `ram_tier`.
"""

from __future__ import annotations

from zero_checkpoint.memory.node import age


class Line:
    """The round that the next checkpoint is named with, at least."""

    def __init__(self, round: int) -> None:
        self.round = round

    def goes_on_from(self, name: str) -> None:
        """A checkpoint of this name was saved or loaded."""
        self.round = max(self.round, age(name)[0])
