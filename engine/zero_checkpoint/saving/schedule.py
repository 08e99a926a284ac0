"""When a save is due, by the intervals of the script and the config, in steps or in seconds.

The interval chosen by `"auto"` is Young's optimum between the time of saves and that of steps that
a failure makes compute again, in Daly's second order.

Source: Young, CACM 17(9), 1974; Daly, FGCS 22(3), 2006, eq. 37. CheckFreq (FAST 2021) tunes the
interval to the stall in the same way.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zero_checkpoint.options import AUTO, Checkpoint
from zero_contract.errors import ZeroError

_log = logging.getLogger(__name__)

RETRY_S = 60.0
"""The time after which a save is due again that found no room on the disk, or no etcd."""
_WORTH_A_WORD = 1.2
"""The factor by which "auto" must have moved to be reported again."""


class Schedule:
    """One rank's view of when the next save is due."""

    def __init__(
        self,
        config: Checkpoint,
        restarts: int,
        rank: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._restarts = restarts
        self._rank = rank
        self._clock = clock
        self._started_s = self._last_save_s = clock()
        self._elapsed_before_s = 0.0
        self._stall_s = 0.0
        self._write_s: float | None = None
        self._reported_s: float | None = None
        self._since_save_s = self._auto_s = 0.0
        self._failed_s: float | None = None
        self._retries = False

    # ---- measuring ----

    @property
    def elapsed_s(self) -> float:
        """Seconds that the job has trained, in this round and those before."""
        return self._elapsed_before_s + self._clock() - self._started_s

    def resume_from(self, elapsed_s: float) -> None:
        """Take over the time of the rounds before from a checkpoint."""
        self._elapsed_before_s = elapsed_s

    def begun(self, stall_s: float) -> None:
        """A save has begun, and has stalled training for `stall_s`."""
        self._last_save_s = self._clock() - stall_s  # when it has begun
        self._since_save_s = 0.0
        self._stall_s = stall_s
        self._retries = False
        if self._failed_s is not None and self._failed_s < self._last_save_s:
            self._failed_s = None  # of a save before this one

    def committed(self, write_s: float) -> None:
        """A save has been committed, `write_s` after its beginning."""
        self._write_s = write_s

    def failed_for_now(self) -> None:
        """A save has failed because the disk is full, or etcd away."""
        self._failed_s = self._clock()

    # ---- what travels ----

    def notes(self) -> tuple[float, float, bool]:
        """For all ranks: seconds since the last save, the interval of "auto", whether to retry."""
        costs = None
        if self._write_s is not None:
            costs = Costs(stall_s=self._stall_s, write_s=self._write_s)
        failures = Failures(restarts=self._restarts, elapsed_s=self.elapsed_s)
        interval_s, reason = best_interval_s(costs, failures)
        if self._config.every_s == AUTO and self._rank == 0:
            known_s = self._reported_s
            if known_s is None or not 1 / _WORTH_A_WORD < interval_s / known_s < _WORTH_A_WORD:
                self._reported_s = interval_s
                _log.info("checkpoints: %s", reason)
        retries = self._failed_s is not None and self._clock() - self._failed_s >= RETRY_S
        return self._clock() - self._last_save_s, interval_s, retries

    def take_notes(self, notes: Sequence[float]) -> None:
        """Use rank 0's notes, on every rank."""
        # Clocks differ: all ranks decide by one, so they decide alike.
        self._since_save_s, self._auto_s, retries = notes
        self._retries = bool(retries)

    # ---- deciding ----

    def due(self, step: int, every_steps: int | None, every_s: float | str | None) -> bool:
        """Whether to save after this step, by the given interval or else by the config's.

        Raises:
            ZeroError: There is no interval, or there are two.
        """
        if every_steps is None and every_s is None:
            every_steps, every_s = self._config.every_steps, self._config.every_s
        if (every_steps is None) == (every_s is None):
            raise ZeroError(
                "checkpoint_due(): give it every_steps or every_s, or set one of them in the "
                'config\'s "checkpoint"'
            )
        if self._retries:
            return step > 0
        if every_steps is not None:
            return step > 0 and step % every_steps == 0
        wanted_s = self._auto_s if every_s == AUTO else float(every_s or 0.0)
        # At 0 no step has ended since the save: with an interval of 0 it would be due once more.
        return step > 0 and self._since_save_s > 0 and self._since_save_s >= wanted_s


_PRIOR_FAILURES, _PRIOR_S = 0.1, 0.1 * 24 * 3600
"""A prior of a tenth of a failure in a tenth of a day: one failure a day is expected until the
job's own failures outweigh it, which the first of them does."""
_FIRST_S = 60.0
"""The interval before anything is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The costs of the last save."""

    stall_s: float
    """The time for which training stood still."""
    write_s: float
    """The time until it was committed; the next save cannot begin earlier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """The interruptions of the job so far."""

    restarts: int
    elapsed_s: float
    """The time in which the restarts happened."""

    @property
    def mean_time_s(self) -> float:
        """Expected time between failures."""
        return (_PRIOR_S + self.elapsed_s) / (_PRIOR_FAILURES + self.restarts)


def best_interval_s(costs: Costs | None, failures: Failures) -> tuple[float, str]:
    """Seconds between the beginnings of two saves, and why."""
    if costs is None:
        return _FIRST_S, f"saving every {_FIRST_S:g} s until a save has been measured"
    between_s = failures.mean_time_s
    optimal_s = daly_s(costs.stall_s, between_s)
    seen = (
        f"a save stalls {costs.stall_s:.3g} s, is written in {costs.write_s:.3g} s, and with "
        f"{failures.restarts} restarts in {failures.elapsed_s:.0f} s a failure is expected every "
        f"{between_s:.0f} s"
    )
    if optimal_s < costs.write_s:
        return costs.write_s, f"saving without pause, every {costs.write_s:.3g} s: {seen}"
    return optimal_s, f"saving every {optimal_s:.3g} s: {seen}"


def daly_s(cost_s: float, between_s: float) -> float:
    """The time to compute between two saves that cost `cost_s`, at a failure every `between_s`."""
    if cost_s >= 2 * between_s:  # Daly's second case: the series below does not hold
        return between_s
    ratio = cost_s / (2 * between_s)
    return math.sqrt(2 * cost_s * between_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s
