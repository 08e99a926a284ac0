"""The errors of the engine: one tree, each message naming what, where and the remedy."""

from __future__ import annotations


class EngineError(Exception):
    """Anything the engine reports to a user."""


class ConfigError(EngineError, ValueError):
    """The configuration is wrong: an unknown key, a value out of bounds, a contradiction."""


class PeerLost(EngineError):
    """A collective failed because another rank is gone; this rank itself is healthy."""


class LeavingNow(PeerLost):
    """This rank was asked to leave its group without waiting for anything."""


class Diverged(EngineError):
    """The ranks wait for each other, because they do not do the same."""


class CheckpointError(EngineError):
    """A checkpoint could not be saved or loaded."""


class DiskFull(CheckpointError):
    """The storage has no room for a checkpoint: nothing was published; room may be made."""


class DamagedCheckpoint(CheckpointError):
    """Bytes on disk are not the bytes that were saved: truncated, flipped, missing, swapped."""


class ModelMismatch(CheckpointError):
    """The checkpoint is intact but belongs to another model."""


class CommitRefused(CheckpointError):
    """The round of this worker is over, or its agent is cut off: nothing was published."""

    def __init__(self, message: str, *, passing: bool = False) -> None:
        super().__init__(message)
        self.passing = passing
        """Etcd does not take it: the agent, which is there, says so and sees to it."""


class TierError(EngineError):
    """State could not be moved to or from the place where it rests between uses."""
