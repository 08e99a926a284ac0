"""The state of this node's workers, taken together."""

from __future__ import annotations

from enum import StrEnum


class Workers(StrEnum):
    """The state of this node's workers, taken together."""

    NONE = "none"
    STARTING = "starting"
    """They warm up: they run the script to its engine, before they have a round."""
    READY = "ready"
    """They have warmed up, and wait at their engine for a round."""
    RUNNING = "running"
    STOPPING = "stopping"
    PARKED = "parked"
    """They have left the round, and wait in their processes for the next one."""
    STRANDED = "stranded"
    """They have lost a peer, and wait in their processes for the next round."""
    STOPPED = "stopped"
    SUCCEEDED = "succeeded"
    LEFT = "left"
    PEER_LOST = "peer lost"
    FAILED = "failed"


WAITING = frozenset({Workers.PARKED, Workers.STRANDED})
"""States in which workers wait in their processes for the next round."""
LOST_PEER = frozenset({Workers.STRANDED, Workers.PEER_LOST})
"""States of workers that have lost a peer, and nothing worse."""
BUSY = frozenset({Workers.RUNNING, Workers.STOPPING})
"""States in which workers may use the process group of their round."""
