"""The steps of this node's workers: how far they are, and which of them takes too long.

They come from two sides, which count the same: workers under our engine report each step on their
socket, any other script may show a pulse.

Must always hold: nothing is judged of a worker that has said nothing. Who calls it: the crew.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from zero_agent.pulse import Pulses
from zero_agent.workers.hang import HangPolicy, StepClock
from zero_contract.clock import Clock
from zero_contract.worker import Progress


class Steps:
    """The steps of one node's workers, from round to round."""

    def __init__(self, policy: HangPolicy, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        self._clocks: dict[int, StepClock] = {}
        self._pulses = Pulses({})
        self._promised = False
        self.last: Progress | None = None
        """The last step that any worker of this node has reported, in whichever round."""

    @property
    def finished(self) -> int | None:
        """The last step that workers have finished, 0 before the first; None: they do not say."""
        if self.last is not None:
            return self.last.step
        return 0 if self._promised else None

    @property
    def begun(self) -> bool:
        """Whether a worker has finished a step of this round."""
        return bool(self._clocks)

    def begin(self, pulses: Mapping[int, Path]) -> None:
        """A round begins.

        Args:
            pulses: Where each worker, by rank, may show its pulse.
        """
        self._clocks = {}
        self._pulses = Pulses(dict(pulses))

    def promise(self) -> None:
        """A worker has said that it will report its steps."""
        self._promised = True

    def beat(self, rank: int, progress: Progress | None = None) -> None:
        """A worker gets on; `progress` if it says how far it is."""
        self.last = progress or self.last
        self._clocks.setdefault(rank, StepClock(self._policy)).beat(self._clock.now())

    def too_slow(self) -> tuple[int, str] | None:
        """The first worker that is taken for hung, and why; feels every pulse before."""
        for rank, step in self._pulses.beats():
            self.beat(rank, None if step is None else Progress(step=step))
        for rank, clock in self._clocks.items():
            if verdict := clock.verdict(self._clock.now()):
                return rank, verdict
        return None
