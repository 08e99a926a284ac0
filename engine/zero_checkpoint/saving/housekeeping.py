"""After a commit: mark damaged checkpoints, delete expired ones, and what dead saves have left.

Only the rank that has just committed removes anything, so a stale worker, whose commits are
refused, removes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.place import Place, exists, is_dir
from zero_checkpoint.format.manifest import MANIFEST, TOMBSTONE
from zero_checkpoint.loading.candidates import Rejected, examine, find
from zero_checkpoint.loading.ownership import refusal
from zero_checkpoint.loading.suspects import mark
from zero_checkpoint.saving.retention import Best, abandoned, check_policy, expired, remove, sweep

_log = logging.getLogger(__name__)

_DEAD_AFTER_S = 3600.0
"""Longer than any rank waits for another in a save (`StoreConsensus`, 40 minutes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """The checkpoints that stay, see `retention.expired`; by default all."""

    last: int | None = None
    every: int | None = None
    best: Best | None = None

    def __post_init__(self) -> None:
        # Now: `tidy` runs when the save has succeeded, and raises nothing.
        if self.last is not None:
            check_policy(keep_last=self.last, keep_every=self.every)


def tidy(root: Place, committed: Place, keep: Keep) -> None:
    """Remove expired checkpoints, and attempts that were idle for an hour; never raises.

    `committed` is the newest checkpoint, which was committed just now.
    """
    try:
        # Another run saves here as well: its checkpoints are not this one's to count or to delete.
        if problem := refusal(root):
            _log.warning("nothing was deleted: %s", problem)
            return
        mark(root)
        if keep.last is not None:
            paths = expired(
                find(root).candidates,
                keep_last=keep.last,
                keep_every=keep.every,
                keep_best=keep.best,
                protected=[committed],
            )
            for path in paths:
                _attempt(remove, path, "expired")
        # Directories without a manifest that no process writes to; no manifest is read for this.
        rejected = []
        for path in root.iterdir():
            manifest = path / MANIFEST
            # A tombstone has the manifest's name: what is longer is a manifest.
            if is_dir(path) and not (exists(manifest) and manifest.stat().st_size > len(TOMBSTONE)):
                entry = examine(path)
                rejected += [entry] if isinstance(entry, Rejected) else []
        # By the clock of the storage, which dates those directories, too.
        now_s = (committed / MANIFEST).stat().st_mtime
        leftovers, _ = abandoned(rejected, now_s=now_s, older_than_s=_DEAD_AFTER_S)
        for leftover in leftovers:
            _attempt(sweep, leftover.path, leftover.reason)
    except (OSError, CheckpointError) as error:  # the save itself has succeeded
        _log.warning("old checkpoints under %s could not be looked at: %s", root, error)


def _attempt(action: Callable[[Place], None], path: Place, reason: str) -> None:
    try:
        action(path)
        _log.info("removed %s: %s", path, reason)
    except (OSError, CheckpointError) as error:
        _log.warning("%s (%s) could not be removed: %s", path, reason, error)
