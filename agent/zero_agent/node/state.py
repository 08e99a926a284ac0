"""The state of this node's workers, taken together."""

from __future__ import annotations

from enum import StrEnum


class Workers(StrEnum):
    """The state of this node's workers, taken together."""

    NONE = "none"
    RUNNING = "running"
    STOPPING = "stopping"
    PARKED = "parked"
    """They have left the round, and wait in their processes for the next one."""
    STOPPED = "stopped"
    SUCCEEDED = "succeeded"
    LEFT = "left"
    PEER_LOST = "peer lost"
    FAILED = "failed"


BUSY = frozenset({Workers.RUNNING, Workers.STOPPING})
"""States in which workers may use the process group of their round."""
