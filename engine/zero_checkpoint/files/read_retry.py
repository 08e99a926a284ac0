"""Retries of reads, with exponential backoff: an error of a network file system may pass.

A disk that has lost a sector returns EIO for good. A network file system returns EIO, ESTALE or
ETIMEDOUT while its server fails over or admits a client again, and works a second later. Only an
error that stays is evidence against a checkpoint.

Must always hold: every retry ends, after `TRIES` tries and about 1 s; nothing but reading is
repeated. An object store's client retries by itself, and a node whose memory holds a checkpoint
is not waited for.
"""

from __future__ import annotations

import errno
import logging

import tenacity

_log = logging.getLogger(__name__)

MAY_PASS = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT})
"""Errors that a file system also returns for a condition that is over soon."""
TRIES = 5


def may_pass(error: BaseException) -> bool:
    """Whether a retry may succeed."""
    return isinstance(error, OSError) and error.errno in MAY_PASS


def _log_retry(state: tenacity.RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    _log.warning("reading again, try %d of %d: %s", state.attempt_number + 1, TRIES, error)


patiently = tenacity.Retrying(
    retry=tenacity.retry_if_exception(may_pass),
    stop=tenacity.stop_after_attempt(TRIES),
    # Random, so that a thousand ranks do not return to their server at the same time.
    wait=tenacity.wait_exponential(multiplier=0.05) + tenacity.wait_random(0, 0.05),
    before_sleep=_log_retry,
    reraise=True,
)
"""`patiently(read, ...)` calls `read` until it succeeds; raises the error of the last try."""
