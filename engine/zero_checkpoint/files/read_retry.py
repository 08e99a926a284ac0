"""Reading once more what a file system could not give: the next answer may be another one.

A disk that has lost a sector says EIO for good. A network file system says it, ESTALE or ETIMEDOUT,
also while its server changes over or a client is let in again, and a second later all is well. Only
an error that stays is what `candidates` and `reader` judge a checkpoint by.

Must always hold: every trying ends, `TRIES` times and about 1 s later; nothing but reading is
repeated. An object store's client does this by itself, and a node whose memory holds a checkpoint
is not waited for.

Called by `files.local_file` and `format.parse`.
"""

from __future__ import annotations

import errno
import logging

import tenacity

_log = logging.getLogger(__name__)

MAY_PASS = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT})
"""What a file system also says of a trouble that is over soon."""
TRIES = 5


def may_pass(error: BaseException) -> bool:
    """Whether it is worth to try again."""
    return isinstance(error, OSError) and error.errno in MAY_PASS


def _tell(state: tenacity.RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    _log.warning("reading again, try %d of %d: %s", state.attempt_number + 1, TRIES, error)


patiently = tenacity.Retrying(
    retry=tenacity.retry_if_exception(may_pass),
    stop=tenacity.stop_after_attempt(TRIES),
    # Random, so that a thousand ranks do not come back to their server in step.
    wait=tenacity.wait_exponential(multiplier=0.05) + tenacity.wait_random(0, 0.05),
    before_sleep=_tell,
    reraise=True,
)
"""`patiently(read, ...)` calls it until it succeeds; raises what the last try raised."""
