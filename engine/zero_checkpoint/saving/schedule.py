"""When a save is due, by the intervals of the script and the config, in steps or in seconds.

Must always hold: all ranks decide alike. Clocks differ, so every rank uses rank 0's numbers, which
travel with the notes of each step; a number that rank 0 has measured since counts from the next
step on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from zero_checkpoint.options import AUTO, Checkpoint
from zero_checkpoint.saving.interval import Costs, Failures, best_interval_s
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
        self._last_save_s = self._clock() - stall_s
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
        return step > 0 and self._since_save_s > 0 and self._since_save_s >= wanted_s
