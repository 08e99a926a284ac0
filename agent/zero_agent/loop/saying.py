"""What an agent's log is told of the job: each sentence once, and a long wait now and then.

While the workers of many nodes stop, the sentence that names them changes with every one of them:
it is said when it begins, and again every `AGAIN_S`, with those that are left then.
"""

from __future__ import annotations

from zero_agent.loop.limits import waits_for_workers
from zero_contract.clock import Clock, Stopwatch

AGAIN_S = 10.0


class Sayings:
    """What has been said last."""

    def __init__(self, clock: Clock) -> None:
        self._said = ""
        self._wait = Stopwatch(clock)

    def is_news(self, reason: str) -> bool:
        """Whether to say this now; if so, it is taken as said."""
        if not waits_for_workers(reason):
            self._wait.stop()
        elif self._wait.running and not self._wait.past(AGAIN_S):
            return False
        else:
            self._wait.stop()
            self._wait.start()
        news, self._said = reason != self._said, reason
        return news
