"""Retry policies for calls to the store: exponential backoff with jitter, by tenacity.

A call that is retried must be idempotent: a read, or a transaction that compares what it read. A
write without an answer may have taken effect.

Source of the idea: "full jitter",
https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
"""

from __future__ import annotations

import logging
import threading

import tenacity

from zero_orchestrator.errors import StoreUnavailable

_log = logging.getLogger(__name__)

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 2.0

# Random: a thousand agents that lost the same server do not retry in step.
_JITTER = tenacity.wait_random_exponential(multiplier=FIRST_WAIT_S, max=LONGEST_WAIT_S)


class _WithinDeadline(tenacity.wait.wait_base):
    """The jitter, shortened so that the last try starts at the deadline."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def __call__(self, retry_state: tenacity.RetryCallState) -> float:
        left_s = self._timeout_s - (retry_state.seconds_since_start or 0.0)
        return max(0.0, min(_JITTER(retry_state), left_s))


def within(timeout_s: float, *, cancelled: threading.Event | None = None) -> tenacity.Retrying:
    """Retry while the store is unavailable, until `timeout_s` seconds have passed.

    Use it as `within(30)(store.get, key)` or as a decorator.

    Args:
        timeout_s: The last try starts after this many seconds, so the total is at most one call
            longer.
        cancelled: Setting this event ends the wait and the retries at once.

    Raises (when used):
        StoreUnavailable: The error of the last try, at the deadline or once `cancelled` is set.
    """
    cancelled = cancelled or threading.Event()  # one that nobody sets
    return until_set(cancelled).copy(
        wait=_WithinDeadline(timeout_s),
        stop=tenacity.stop_after_delay(timeout_s) | tenacity.stop_when_event_set(cancelled),
    )


def until_set(cancelled: threading.Event) -> tenacity.Retrying:
    """Retry while the store is unavailable, until `cancelled` is set.

    Raises (when used):
        StoreUnavailable: The error of the last try, once `cancelled` is set.
    """
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(StoreUnavailable),
        wait=_JITTER,
        stop=tenacity.stop_when_event_set(cancelled),
        sleep=tenacity.sleep_using_event(cancelled),
        before_sleep=tenacity.before_sleep_log(_log, logging.DEBUG),
        reraise=True,
    )
