"""A local copy of all keys under a prefix, kept current by a watch.

The cost of a read grows with the number of keys; the cost of applying a change does not. So a
job's keys are read once, and then each change is applied to the copy. The copy is always the state
of the store at one revision, never an older one than before; it may be slightly stale, unless
`distrust` was called.

Source of the idea: the reflector of Kubernetes' client-go (list, then watch from there).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from zero_orchestrator.errors import StoreError
from zero_orchestrator.store.kv import Change, KeyValue, KeyValueStore, Range


class Position(NamedTuple):
    """The point up to which the history of a store was known."""

    cluster: int
    revision: int

    def follows(self, before: Position) -> bool:
        """Whether a store can have come here from there."""
        return self.cluster == before.cluster and self.revision >= before.revision


class Jump(NamedTuple):
    """Two positions of which the second does not follow the first."""

    before: Position
    after: Position

    def __str__(self) -> str:
        (was, before), (now, after) = self
        if was != now:
            return (
                f"etcd is another cluster than before: its id is {now:x} and no longer {was:x}, "
                f"its revision {after} after {before}"
            )
        return f"etcd has gone back in time, from revision {before} to {after}"


class Replica:
    """The keys under one prefix. `look` is for one thread; changes arrive on one of the store."""

    def __init__(self, store: KeyValueStore, prefix: str, on_change: Callable[[], None]) -> None:
        """Read the keys, and watch them from that revision.

        `on_change` is called on a thread of the store after each change.

        Raises:
            StoreUnavailable: The store did not answer; nothing is being watched.
        """
        self._store = store
        self._prefix = prefix
        self._on_change = on_change
        self._lock = threading.Lock()
        self._items: dict[str, KeyValue]
        self._at: Position
        self._range: Range | None
        self._stale = False
        self._later: list[Change] | None = None
        """The changes delivered by the watch since it left some out; None: it has left out none."""
        self._jump: Jump | None = None
        self._replace(store.range(prefix))
        self._watch = store.watch(
            prefix,
            self._apply,
            after=self._at.revision,
            cluster=self._at.cluster,
            on_compacted=self._lost_track,
        )

    def look(self) -> Range:
        """The keys as of one revision; the same object until something has changed.

        Raises:
            StoreUnavailable, StoreRefused: The copy is stale, and cannot be read again.
        """
        if self._stale:
            self._read()
        with self._lock:
            if self._range is None:
                cluster, revision = self._at
                self._range = Range(revision, tuple(self._items.values()), cluster)
            return self._range

    def distrust(self) -> None:
        """Mark the copy as stale, after a write: the next `look` reads the keys from the store."""
        self._stale = True

    def jump(self) -> Jump | None:
        """Whether the store's answers have ceased to follow each other since the last call.

        The store was restored from a copy, has lost its data, or another one is in its place.
        """
        if self._stale:
            return None  # the next read may know more
        with self._lock:
            jump, self._jump = self._jump, None
        return jump

    def close(self) -> None:
        """End the watch."""
        self._watch.cancel()

    def _read(self) -> None:
        self._stale = False  # before the read: a write during the read needs another one
        before, later = self._at, self._later
        try:
            found = self._store.range(self._prefix)
        except StoreError:  # no answer, or a refusal: the next `look` tries again
            self._stale = True
            raise
        now = Position(found.cluster, found.revision)
        with self._lock:
            # One revision has one content: another one under it is that of another history.
            same = now == self._at and {item.key: item for item in found.items} == self._items
            if not now.follows(before) or (now == self._at and later is None and not same):
                self._jump = Jump(self._jump.before if self._jump else before, now)
                if later is None:  # is the watch in the new history? The next read knows
                    self._later, self._stale = [], True
            elif later is None and now.revision <= self._at.revision:
                return  # the watch is ahead
            # Not if the watch has lost track again meanwhile: that needs one more read.
            if later is not None and self._later is later:
                self._later = None
            self._replace(found)
            self._change(later or ())

    def _replace(self, found: Range) -> None:
        self._items = {item.key: item for item in found.items}
        self._at = Position(found.cluster, found.revision)
        self._range = None

    def _change(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if change.revision <= self._at.revision:
                continue  # a read is ahead of the watch
            if change.item is None:
                self._items.pop(change.key, None)
            else:
                self._items[change.key] = change.item
        if changes:
            revision = max(self._at.revision, changes[-1].revision)
            self._at, self._range = self._at._replace(revision=revision), None

    def _apply(self, changes: Sequence[Change]) -> None:
        with self._lock:
            if self._later is None:
                self._change(changes)
            else:
                self._later.extend(changes)
        self._on_change()

    def _lost_track(self, revision: int) -> None:
        """The history is compacted, or is that of another store: read all keys again."""
        with self._lock:
            now = self._at._replace(revision=revision)
            if self._jump is None and not now.follows(self._at):
                self._jump = Jump(self._at, now)
            # What the watch delivers from now on cannot be applied to the keys of before.
            self._later, self._stale = [], True
        self._on_change()
