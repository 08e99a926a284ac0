"""The optimal checkpoint interval, from the cost of a save and the time between failures.

A save costs time; steps that were not saved when a failure comes cost the time to compute them
again. The interval is Young's optimum between the two, in Daly's second order. Pure functions; all
ranks must call them with the same numbers.

Source: Young, CACM 17(9), 1974; Daly, FGCS 22(3), 2006, eq. 37. CheckFreq (FAST 2021) tunes the
interval to the stall in the same way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    if cost_s >= 2 * between_s:
        return between_s
    ratio = cost_s / (2 * between_s)
    return math.sqrt(2 * cost_s * between_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s
