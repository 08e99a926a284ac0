"""The state of this node's workers, taken together."""

from __future__ import annotations

from enum import StrEnum


class Workers(StrEnum):
    """The state of this node's workers, taken together."""

    NONE = "none"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    SUCCEEDED = "succeeded"
    LEFT = "left"
    PEER_LOST = "peer lost"
    FAILED = "failed"


BUSY = frozenset({Workers.RUNNING, Workers.STOPPING})
"""States in which worker processes exist."""
