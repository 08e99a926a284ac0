"""Exchanges that are left under way: whoever has begun them may wait late, or never."""

from __future__ import annotations

import atexit
import os
from contextlib import suppress

from zero_comm.exchange.collectives import Pending, wait

_UNDER_WAY: dict[int, Pending] = {}
"""By `id`, which is theirs as long as they are here."""


def leave(pending: Pending) -> None:
    """Leave an exchange under way; `finish` waits for it."""
    # Kept until it has ended, though all else that knows of it be dropped: its buffers are in use.
    _UNDER_WAY[id(pending)] = pending


def finish(pending: Pending) -> None:
    """Block until the exchange has ended; as `collectives.wait`, also in what is raised."""
    try:
        wait(pending)
    except BaseException:  # a lost peer, or Ctrl-C: nothing is to be waited for again
        _UNDER_WAY.clear()
        raise
    _UNDER_WAY.pop(id(pending), None)


def forget() -> None:
    """Wait for none of them: their group has been aborted."""
    _UNDER_WAY.clear()


def _end() -> None:
    # Other ranks may still read from the memory of this process.
    for pending in list(_UNDER_WAY.values()):
        with suppress(Exception):  # a peer is lost, and nobody is left who would use what is coming
            wait(pending)


atexit.register(_end)
os.register_at_fork(after_in_child=_UNDER_WAY.clear)  # a fork has none of the threads that receive
