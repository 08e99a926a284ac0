"""Which checkpoints may be deleted, and how to delete one so that no half of it is ever loaded.

The decisions are pure; only `remove` and `sweep` write. A process that dies in them at any line
leaves a directory that `abandoned` finds later.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeGuard

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.object_disk import disk_of
from zero_checkpoint.files.place import Place, exists
from zero_checkpoint.files.storage import REMOVED, Disk
from zero_checkpoint.format.manifest import MANIFEST
from zero_checkpoint.loading.candidates import Candidate, Rejected, Why

FEWEST_KEPT = 2
"""With one, the damage of a single file would be the loss of the training."""
_LEFTOVER = re.compile(rf"{re.escape(REMOVED)}step-\d{{9,}}\.g\d+\.[0-9a-f]{{4}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The checkpoints with the best values of a metric in the script's client_state."""

    metric: str
    """A key of `client_state`."""
    mode: str = "min"
    """Whether a smaller ("min") or a larger ("max") value is better."""
    count: int = 1

    def value(self, checkpoint: Candidate) -> float | None:
        """The metric; None if it is missing, or no finite number."""
        client = checkpoint.manifest.meta.get("client")
        value = client.get(self.metric) if isinstance(client, dict) else None
        return float(value) if is_number(value) and math.isfinite(value) else None

    def among(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The best ones, best first; of equal ones the newer. `candidates` are newest first."""
        valued = [(self.value(c), c) for c in candidates]
        sign = 1 if self.mode == "min" else -1
        known = [(sign * value, c) for value, c in valued if value is not None]
        return [c for _, c in sorted(known, key=lambda pair: pair[0])[: self.count]]


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number in JSON."""
    return type(value) in (int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A directory that no load would choose and no process writes to."""

    path: Place
    reason: str


def expired(
    candidates: Sequence[Candidate],
    *,
    keep_last: int,
    keep_every: int | None = None,
    keep_best: Best | None = None,
    protected: Collection[Place] = (),
) -> list[Place]:
    """The checkpoints that may be deleted, oldest first: dying midway leaves the newer ones.

    Args:
        candidates: All usable checkpoints of a root, newest first, as `candidates.find` lists
            them; quarantined ones do not count as kept, and those that were saved aside stay.
        keep_last: The number of newest checkpoints that stay, at least 2.
        keep_every: The newest checkpoint of each step that is a multiple of it stays as well.
        keep_best: The best of all of them stay as well.
        protected: These stay in any case, for example the only verified one.

    Raises:
        CheckpointError: `keep_last` or `keep_every` is out of bounds.
    """
    check_policy(keep_last=keep_last, keep_every=keep_every)
    candidates = [candidate for candidate in candidates if not candidate.manifest.is_aside]
    kept = {candidate.path for candidate in candidates[:keep_last]} | set(protected)
    if keep_every is not None:
        # Newest first: reversed, the newest of a step comes last, and stays in the dictionary.
        newest_of_step = {c.manifest.step: c.path for c in reversed(candidates)}
        kept |= {path for step, path in newest_of_step.items() if step % keep_every == 0}
    if keep_best is not None:
        kept |= {candidate.path for candidate in keep_best.among(candidates)}
    return [c.path for c in reversed(candidates) if c.path not in kept]


def check_policy(*, keep_last: int, keep_every: int | None) -> None:
    """Refuse numbers out of bounds: raises CheckpointError."""
    if keep_last < FEWEST_KEPT:
        raise CheckpointError(
            f"keep_last={keep_last}: the newest checkpoint may turn out damaged; "
            f"keep at least {FEWEST_KEPT}"
        )
    if keep_every is not None and keep_every < 1:
        raise CheckpointError(f"keep_every={keep_every}: write a number of steps from 1, or none")


def abandoned(
    entries: Iterable[Rejected], *, now_s: float, older_than_s: float
) -> tuple[list[Leftover], list[str]]:
    """The leftovers of dead saves and dead deletions, and why the other directories stay.

    In leftovers nothing has changed for `older_than_s`, by the clock of the storage.
    """
    leftovers: list[Leftover] = []
    kept: list[str] = []
    for entry in entries:
        if entry.why is Why.REMOVED or _LEFTOVER.fullmatch(entry.path.name):
            leftovers.append(Leftover(path=entry.path, reason="left by a deletion that died"))
        elif entry.why is Why.UNCOMMITTED:
            # A running save writes its files: one whose files have not changed for longer than any
            # rank waits for another is dead.
            with going(entry.path):
                idle_s = now_s - last_change_s(entry.path)
                sentence = f"never committed, last written {max(idle_s, 0):.0f} s ago"
                if idle_s > older_than_s:
                    leftovers.append(Leftover(path=entry.path, reason=sentence))
                else:
                    kept.append(f"{entry.path}: {sentence}; the save may still be running")
    return leftovers, kept


@contextmanager
def going(path: Place) -> Iterator[None]:
    """Ignore FileNotFoundError for a directory that another process may be deleting."""
    try:
        yield
    except FileNotFoundError:
        if exists(path / MANIFEST):  # nobody deletes it: something else is missing
            raise


def last_change_s(path: Place) -> float:
    """The last change of a directory or of a file in it, in seconds since the epoch."""
    changed_s = [path.stat().st_mtime]
    for inner in path.iterdir():
        try:
            changed_s.append(inner.stat().st_mtime)
        except FileNotFoundError:  # it is being written or removed just now
            continue
    return max(changed_s)


def remove(path: Place, disk: Disk | None = None) -> None:
    """Delete one checkpoint; returns when it is deleted durably, or others delete it.

    Raises:
        CheckpointError: A file in the directory could not be deleted; it is no checkpoint any
            more, and a later `sweep` deletes the rest.
        OSError: It could not be made to stop being a checkpoint; it is unchanged.
    """
    disk = disk or disk_of(path)
    with going(path):
        # Retired first, durably: from then on no load takes it, whatever is left of it.
        _delete(disk.retire(path, committed=exists(path / MANIFEST)), disk)


def sweep(path: Place, disk: Disk | None = None) -> None:
    """Delete a directory that is no checkpoint. Raises as `remove`."""
    disk = disk or disk_of(path)
    with going(path):
        _delete(disk.retire(path, committed=False), disk)


def _delete(path: Place, disk: Disk) -> None:
    disk.remove_tree(path)
    if exists(path):
        raise CheckpointError(
            f"{path}: not everything in it could be deleted; allow it, then run zero-ckpt repair"
        )
    disk.remove_dangling(path.parent)
    disk.sync_directory(path.parent)
