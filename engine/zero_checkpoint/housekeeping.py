"""After a commit: what has expired goes, and what dead saves have left.

Must always hold: only the rank that has just committed removes anything, so a stale one, whose
commits are refused, removes nothing; the checkpoint just committed stays; a failure here is a
warning, because the save itself has succeeded.

Called by `persistence` on rank 0, in the thread of the save.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from zero_checkpoint.candidates import Rejected, examine, find
from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.place import Place
from zero_checkpoint.format.manifest import MANIFEST, TOMBSTONE
from zero_checkpoint.retention import Best, abandoned, expired, remove, sweep

_log = logging.getLogger(__name__)

DEAD_AFTER_S = 3600.0
"""Longer than any rank waits for another in a save (`StoreConsensus`, 20 minutes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What stays; by default everything."""

    last: int | None = None
    every: int | None = None
    best: Best | None = None


def tidy(root: Place, committed: Place, keep: Keep, *, dead_after_s: float = DEAD_AFTER_S) -> None:
    """Remove what is expired and what is abandoned; never raises.

    Args:
        root: The directory of checkpoints.
        committed: The newest one; its time is what the storage takes for now.
        keep: What stays.
        dead_after_s: How long an attempt must have been idle to count as dead.
    """
    try:
        for path in _expired(root, committed, keep):
            _attempt(remove, path, "expired")
        for path, reason in _leftovers(root, committed, dead_after_s):
            _attempt(sweep, path, reason)
    except (OSError, CheckpointError) as error:
        _log.warning("old checkpoints under %s could not be looked at: %s", root, error)


def _expired(root: Place, committed: Place, keep: Keep) -> list[Place]:
    if keep.last is None:
        return []
    candidates = find(root).candidates
    return expired(
        candidates,
        keep_last=keep.last,
        keep_every=keep.every,
        keep_best=keep.best,
        protected=[committed],
    )


def _leftovers(root: Place, committed: Place, dead_after_s: float) -> Iterator[tuple[Place, str]]:
    """Directories without a manifest that nobody works on; no manifest is read for this."""
    bare = [path for path in root.iterdir() if path.is_dir() and not _has_manifest(path)]
    rejected = [entry for entry in map(examine, bare) if isinstance(entry, Rejected)]
    now_s = (committed / MANIFEST).stat().st_mtime
    found, _ = abandoned(rejected, now_s=now_s, older_than_s=dead_after_s)
    yield from ((leftover.path, leftover.reason) for leftover in found)


def _has_manifest(path: Place) -> bool:
    manifest = path / MANIFEST
    return manifest.exists() and manifest.stat().st_size > len(TOMBSTONE)


def _attempt(action: Callable[[Place], None], path: Place, reason: str) -> None:
    try:
        action(path)
        _log.info("removed %s: %s", path, reason)
    except (OSError, CheckpointError) as error:
        _log.warning("%s (%s) could not be removed: %s", path, reason, error)
