"""List a directory of checkpoints, newest first, and what is wrong with the rest.

Reads manifests and sizes of files, and no data unless asked to verify.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from zero_checkpoint.files.place import Place
from zero_checkpoint.format.manifest import MANIFEST
from zero_checkpoint.loading.candidates import Candidate, Rejected, Why, scan
from zero_checkpoint.saving.retention import going, last_change_s
from zero_checkpoint.tools.verify import Damage, misfit, total_bytes


class ListedStatus(StrEnum):
    """How far a checkpoint can be trusted."""

    COMMITTED = "committed"
    """Its manifest is whole and every file has its size; the data were not read."""
    VERIFIED = "verified"
    """Committed, and every block was read and is what was saved."""
    DAMAGED = "damaged"
    QUARANTINED = "quarantined"
    UNCOMMITTED = "uncommitted"
    NEWER = "newer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedCheckpoint:
    """One directory. The fields of its manifest are None if the manifest cannot be read."""

    name: str
    status: ListedStatus
    reason: str
    """The damage in a sentence; empty if there is none."""
    age_s: float
    """Seconds since the commit, or since the last change of a directory never committed."""
    step: int | None = None
    tag: str | None = None
    size_bytes: int | None = None
    world: int | None = None
    stage: int | None = None


_STATUS = {
    Why.UNCOMMITTED: ListedStatus.UNCOMMITTED,
    Why.REMOVED: ListedStatus.UNCOMMITTED,
    Why.DAMAGED: ListedStatus.DAMAGED,
    Why.NEWER: ListedStatus.NEWER,
    Why.QUARANTINED: ListedStatus.QUARANTINED,
}

Check = Callable[[Candidate], list[Damage]]


def list_roots(
    top: Place, roots: Sequence[Place], *, now_s: float, check: Check | None = None
) -> list[ListedCheckpoint]:
    """The rows of `list_root` of several roots; names begin with the root's, if it is not `top`."""
    rows = []
    for root in roots:
        prefix = "" if root == top else f"{root.name}/"
        listed = list_root(root, now_s=now_s, check=check)
        rows += [replace(row, name=prefix + row.name) for row in listed]
    return rows


def list_root(root: Place, *, now_s: float, check: Check | None = None) -> list[ListedCheckpoint]:
    """All checkpoints of a root, newest first; other directories are left out.

    `check` reads every block, to tell verified from committed; None trusts the sizes.

    Raises:
        OSError: Something could not be read.
    """
    rows = []
    for entry in scan(root):
        name = entry.path.name
        with going(entry.path):  # a training that runs may delete it meanwhile
            if isinstance(entry, Rejected):
                if entry.why is not Why.OTHER:
                    reason = entry.reason.removeprefix(f"{entry.path}: ")
                    age_s = now_s - last_change_s(entry.path)
                    status = _STATUS[entry.why]
                    rows.append(
                        ListedCheckpoint(name=name, status=status, reason=reason, age_s=age_s)
                    )
                continue
            status, reason = _judge(entry, check)
            rows.append(
                ListedCheckpoint(
                    name=name,
                    status=status,
                    reason=reason,
                    age_s=now_s - (entry.path / MANIFEST).stat().st_mtime,
                    step=entry.manifest.step,
                    tag=entry.manifest.tag,
                    size_bytes=total_bytes(entry.manifest),
                    world=entry.manifest.world,
                    stage=engine_meta(entry).get("stage"),
                )
            )
    return rows


def _judge(entry: Candidate, check: Check | None) -> tuple[ListedStatus, str]:
    # First the sizes, which cost one listing of the directory: blocks cost a read of everything.
    if found := misfit(entry):
        file, size = found
        return ListedStatus.DAMAGED, f"{file.name} has {size} bytes, not {file.size_bytes}"
    if check is None:
        return ListedStatus.COMMITTED, ""
    damages = check(entry)
    if damages:
        return ListedStatus.DAMAGED, f"{len(damages)} damaged ranges; see zero-ckpt verify"
    return ListedStatus.VERIFIED, ""


def engine_meta(checkpoint: Candidate) -> dict[str, Any]:
    """The engine's member of a manifest's meta; empty if another program wrote the checkpoint."""
    meta = checkpoint.manifest.meta.get("engine")
    return meta if isinstance(meta, dict) else {}
