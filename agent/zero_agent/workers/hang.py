"""When are workers that still run to be taken for hung: a limit learnt from their own steps.

Workers under our engine say when a step has ended (`contract.Progress`). The longest time
between two steps so far, saves included, times a factor is the limit, and some minutes at least:
killing a healthy run is worse than noticing a hang late. A user who knows better says so with
--hang-timeout. Before the second step nothing is known and nothing is judged: the first one
compiles, loads and warms up.

Pure: times are handed in. Who calls it: the crew.

Source of the idea: NVRx's calibrated heartbeat timeouts (x5 of the largest interval seen).
"""

from __future__ import annotations

from dataclasses import dataclass

from zero_contract.values import parse_seconds

FACTOR = 10.0
FLOOR_S = 300.0
"""Never judge faster by oneself: an evaluation between two steps is no hang."""


@dataclass(frozen=True, kw_only=True)
class HangPolicy:
    """How long is too long."""

    limit_s: float | None = None
    """A fixed limit; None: learnt from the steps."""
    enabled: bool = True


class StepClock:
    """The steps of one worker in one round."""

    def __init__(self, policy: HangPolicy) -> None:
        self._policy = policy
        self._last_s: float | None = None
        self._longest_s: float | None = None

    def beat(self, now_s: float) -> None:
        """A step has ended."""
        if self._last_s is not None:
            self._longest_s = max(self._longest_s or 0.0, now_s - self._last_s)
        self._last_s = now_s

    @property
    def limit_s(self) -> float | None:
        """How long the next step may take; None while that cannot be said."""
        if not self._policy.enabled or self._last_s is None:
            return None
        if self._policy.limit_s is not None:
            return self._policy.limit_s
        return None if self._longest_s is None else max(FLOOR_S, FACTOR * self._longest_s)

    def verdict(self, now_s: float) -> str | None:
        """Why this worker is hung, or None if it is not."""
        limit_s = self.limit_s
        if limit_s is None or self._last_s is None or now_s - self._last_s <= limit_s:
            return None
        how = "--hang-timeout" if self._policy.limit_s is not None else f"{FACTOR:g}x the longest"
        return f"no step for {now_s - self._last_s:.1f} s (limit {limit_s:.1f} s, {how})"


def parse_hang_timeout(text: str) -> HangPolicy:
    """`auto`, `off`, or a length of time, such as `600` or `10m`.

    Raises:
        ValueError: None of these.
    """
    if text == "auto":
        return HangPolicy()
    if text == "off":
        return HangPolicy(enabled=False)
    limit_s = parse_seconds(text)
    if limit_s == 0:
        raise ValueError(text)
    return HangPolicy(limit_s=limit_s)
