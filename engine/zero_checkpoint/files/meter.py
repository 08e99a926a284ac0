"""How far a long load or save has come: in the log, and for `zero-ctl status`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from zero_contract.values import in_words

_log = logging.getLogger(__name__)

EVERY_S = 10.0
"""Seconds between two lines; what ends sooner has none."""
TELL_S = 1.0
"""Seconds between two messages to the agent."""


class Meter:
    """Counts bytes; logs a line every `EVERY_S`, and tells the agent every `TELL_S`."""

    def __init__(
        self,
        what: str,
        total_bytes: int,
        now_s: Callable[[], float] = time.monotonic,
        *,
        logs: bool = True,
        tell: Callable[[str, float], None] | None = None,
    ) -> None:
        """Begin.

        `what` lasts, such as `loading step-000000020.g1.9f3a`; one rank `logs` for all. `tell` is
        called with it and the part that is done; None: the agent is not told.
        """
        self._what, self._total_bytes, self._now_s = what, total_bytes, now_s
        # The agent hears of the first bytes at once, the log only of what lasts.
        self._logs, self._tell, self._told_s = logs, tell, now_s() - TELL_S
        self._done_bytes = 0
        self._begun_s = now_s()
        self._due_s = self._begun_s + EVERY_S

    def add(self, count_bytes: int) -> None:
        """Some more bytes are done."""
        self._done_bytes += count_bytes
        now_s = self._now_s()
        if self._tell is not None and now_s - self._told_s >= TELL_S:
            self._told_s = now_s
            self._tell(self._what, self._done_bytes / max(1, self._total_bytes))
        if now_s < self._due_s or not self._done_bytes or not self._logs:
            return
        self._due_s = now_s + EVERY_S
        spent_s = now_s - self._begun_s
        left_s = (self._total_bytes - self._done_bytes) / self._done_bytes * spent_s
        _log.info(
            "%s: rank 0 has done %s of %s, %s/s, about %s left",
            self._what,
            _size(self._done_bytes),
            _size(self._total_bytes),
            _size(self._done_bytes / spent_s),
            in_words(left_s),
        )


def _size(count_bytes: float) -> str:
    unit, name = (1 << 30, "GiB") if count_bytes >= 1 << 30 else (1 << 20, "MiB")
    return f"{count_bytes / unit:.1f} {name}"
