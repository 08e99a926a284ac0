"""Whether a training stays in its process when the ranks of the job change.

A newcomer runs the script from its begin; a survivor is in the middle of it. Must always hold: both
take part in the same exchanges until they are at the same step: those that make the training, and
those of its load. So a script that exchanges anything of its own before its first step, or loads in
another way, is started anew, as without this; and so is whatever does not go as planned.

A survivor comes out of the end of a step, and a newcomer never comes there: what the script does
between two steps is done by survivors alone. A save there writes nothing. A script that has
exchanged anything else there is started anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

from zero_comm.worker.rank_times import WAITS
from zero_data.position_loader import PositionLoader

Standing = tuple[int, int, int]
"""The number of process groups, of what was exchanged in the default one, and of what `Collectives`
has begun, also where there is one rank and nothing travels."""


def standing() -> Standing:
    """The groups and exchanges of this process up to now."""
    if not dist.is_initialized():
        return 0, 0, WAITS.begun
    world: Any = dist.group.WORLD  # torch's stubs lack the call
    try:
        exchanged = world._get_sequence_number_for_group()
    except RuntimeError:  # a group written in Python
        exchanged = -1
    return len(dist.distributed_c10d._world.pg_map), exchanged, WAITS.begun


_all: WeakSet[Staying] = WeakSet()


@contextmanager
def uncounted() -> Iterator[None]:
    """Within it exchanges are the training's own, though the script decides when."""
    before = standing()
    yield
    after = standing()
    for each in _all:
        each.pass_over(before, after)


MEETS_WITHIN_S = 60.0
"""How long a process that stays waits for the others of its next round, at least."""
AS_LONG_AS = 3.0
"""A newcomer comes as late as this process did after its start, or this many times as late."""


class Staying:
    """The exchanges of a script so far, and how its training is made again."""

    def __init__(
        self,
        make_again: Callable[[], Any],
        began: Standing,
        came_after_s: float,
        why_not: str = "",
    ) -> None:
        """Made where the training has been made, in `came_after_s` of this process's life.

        `make_again` makes the training over the group that there is then, and returns its
        `Session`. `began` is the `standing` before it was made; `why_not` says why it cannot stay.
        """
        self.make_again = make_again
        self.why_not = why_not
        self.when_forbidden: Callable[[], None] = lambda: None
        """Called once, when the script first does what forbids it to stay."""
        self.meets_within_s = max(MEETS_WITHIN_S, AS_LONG_AS * came_after_s)
        self._at = standing()
        _all.add(self)
        if self._at[1] < 0:
            self.forbid("its process group does not tell how many exchanges there were")
        if began not in ((0, 0, 0), (1, 0, 0)):  # without a group, or with nothing exchanged in it
            self.forbid("the script exchanges something of its own before it makes the training")
        self.directory: str | None = None
        """The place, an absolute path or a URL, from which the script has loaded."""
        self.in_step = False
        """Whether a step is under way."""
        self.has_begun = False
        """Whether the script has trained in this process."""
        self._since_step: Standing | None = None
        """The `standing` at the end of the last step; None: since then a micro-step has begun."""
        self.loader: PositionLoader[Any] | None = None
        """That of the script's loop, once it is known."""
        self.resumed = False
        """Whether its round began with a checkpoint of the step at which this process is."""

    def forbid(self, why: str) -> None:
        """Start this process anew in the next round."""
        if not self.why_not:
            self.why_not = why
            self.when_forbidden()

    def pass_over(self, before: Standing, after: Standing) -> None:
        """Do not count what has been exchanged between these two."""
        groups, exchanged, begun = (now - then for now, then in zip(after, before, strict=True))

        def later(at: Standing) -> Standing:
            return at[0] + groups, at[1] + exchanged, at[2] + begun

        self._at = later(self._at)
        if self._since_step is not None:
            self._since_step = later(self._since_step)

    def _compare(self, before: str) -> None:
        if standing() != self._at:
            self.forbid(f"the script exchanges something of its own before {before}")

    def _compare_between(self) -> None:
        if self._since_step is not None and standing() != self._since_step:
            self.forbid("the script exchanges something of its own between two steps")

    def load(self, directory: str, *, whole: bool) -> None:
        """Note that the script loads; `whole`: the newest checkpoint, and everything of it."""
        if self.directory is not None or self.has_begun or not whole:
            self.forbid("the script does not load once, everything, before its first step")
        self._compare("its load")
        self.directory = directory

    def save(self, *, whole: bool) -> None:
        """Note that the script saves; `whole`: everything."""
        if not (self.has_begun and whole):
            self.forbid("the script saves before its first step, or without what is not trained")
        self._compare_between()

    def saved(self) -> None:
        """Note the end of a save."""
        if self._since_step is not None:
            self._since_step = standing()

    def loaded(self, *, resumed: bool) -> None:
        """Note the end of the load."""
        self._at, self.resumed = standing(), resumed

    def begin(self) -> None:
        """Note that a micro-step begins."""
        self._compare_between()
        self.in_step, self.resumed, self._since_step = True, False, None
        if not self.has_begun:
            self.has_begun = True
            self._compare("its first step")
            if self.directory is None:
                self.forbid("the script does not load before its first step")

    def hear_loop(self, loader: PositionLoader[Any], *, are_away: bool) -> None:
        """Note that the loop draws a batch, with states that are offloaded or not.

        It must run the batch in this round: here it comes back, and not at the next forward.
        """
        self.loader = loader
        if loader.elsewhere or loader.draws.waiting > 1:
            self.forbid("the loop draws batches ahead")
        if are_away:
            self.forbid("the loop draws its next batch while states are offloaded")

    def lacks(self, step: int | None = None) -> bool:
        """See `PositionLoader.lacks`."""
        return self.loader is not None and self.loader.lacks(step)

    def end_step(self) -> None:
        """Note that the script gets the end of a step back."""
        self.in_step, self._since_step = False, standing()

    def come_back(self) -> None:
        """Note that the script comes back from what it does behind a step."""
        self._compare_between()
        self._since_step = None

    def reason_against(self, *, in_step: bool = False) -> str:
        """Why this process is started anew; empty: it stays, even in the middle of a step."""
        if not self.has_begun or (self.in_step and not in_step):
            return self.why_not or "it is not between two steps"
        if standing()[0] != self._at[0]:
            return self.why_not or "the script has process groups of its own"
        return self.why_not
