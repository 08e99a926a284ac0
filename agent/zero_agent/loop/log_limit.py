"""Rate limit of an agent's log: each reason is logged once, and a long wait from time to time.

While the workers of many nodes stop, the reason that names the remaining nodes changes with every
one of them. It is logged when the wait begins, and again every `AGAIN_S`.
"""

from __future__ import annotations

from zero_contract.clock import Clock, Stopwatch
from zero_orchestrator.membership.moves import Wait

AGAIN_S = 10.0


class LogLimit:
    """The reason that was logged last."""

    def __init__(self, clock: Clock) -> None:
        self._logged = ""
        self._wait = Stopwatch(clock)

    def is_news(self, reason: str, waits_for: Wait | None = None) -> bool:
        """Whether to log this reason now; if so, it counts as logged.

        Args:
            reason: What the job does or waits for, in words.
            waits_for: What it waits for, if that may take long.
        """
        if waits_for is not Wait.WORKERS:
            self._wait.stop()
        elif self._wait.running and not self._wait.past(AGAIN_S):
            return False
        else:
            self._wait.stop()
            self._wait.start()
        news, self._logged = reason != self._logged, reason
        return news
