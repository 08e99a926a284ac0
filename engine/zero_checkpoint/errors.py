"""The errors of checkpoints, each message naming what, where and the remedy."""

from __future__ import annotations

from zero_contract.errors import ZeroError


class CheckpointError(ZeroError):
    """A checkpoint could not be saved or loaded."""


class DiskFull(CheckpointError):
    """Disk full (ENOSPC, EDQUOT) or no room in the store: nothing was published; free some room."""


class OtherRun(CheckpointError):
    """Another run saves to the directory; see `ownership`. Nothing was published or deleted."""


class DamagedCheckpoint(CheckpointError):
    """Bytes on disk are not the bytes that were saved: truncated, flipped, missing, swapped."""

    where: tuple[int, int] | None = None
    """The numbers of the file and of the block; None if it is not in a block of a file."""


class ModelMismatch(CheckpointError):
    """The checkpoint is intact but belongs to another model."""
