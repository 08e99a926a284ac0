"""Whether the world size has changed under a script whose batch, schedule and data are its own.

A torchrun script divides its global batch by the world size of its start, and so its schedule and
its order of samples. Under the engine and `zero_torch.protect` none of them depends on it. Those
announce themselves (`Hello`); the user of a script that announces nothing gets one warning.
"""

from __future__ import annotations

from zero_contract.clock import Clock, Stopwatch

QUIET_S = 60.0
"""A script that runs for so long, or to its end, without an announcement, has none to make. An
engine announces itself when it is made, which follows imports and the load of a model."""


class WorldSize:
    """The world sizes of the rounds in which this node has run workers."""

    def __init__(self, clock: Clock) -> None:
        self._runs = Stopwatch(clock)
        self._now = self._before = 0
        self._tells = self._settled = False

    def begin(self, world_size: int, *, tells: bool) -> None:
        """A round begins; a node that `tells` warns, for all nodes."""
        # The last size that was another one, however many rounds ago.
        if self._now != world_size:
            self._before, self._now = self._now, world_size
        self._tells = tells
        # The workers of a new round may announce themselves as late as those of the first.
        self._runs.stop()
        self._runs.start()

    def announced(self) -> None:
        """A worker has the engine or `zero_torch.protect`."""
        self._settled = True  # in all rounds: the script is the same

    def warning(self, *, done: bool) -> str:
        """The warning, once; empty if there is none, or, while workers run, none yet."""
        if self._settled or not (self._before and self._tells):
            return ""
        if not (done or self._runs.past(QUIET_S)):
            return ""
        self._settled = True
        return (
            f"the world size is {self._now} and was {self._before}, and the script has announced "
            "neither the engine nor zero_torch.protect: if it trains, its global batch, its "
            "schedule and its order of samples follow the world size, and so does the result; "
            "docs/elastic-jobs.md, 'When the world size changes', has what to do"
        )
