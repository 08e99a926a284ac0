"""A local copy of all keys under a prefix, kept current by a watch.

The cost of a read grows with the number of keys; the cost of applying a change does not. So a
job's keys are read once, and then each change is applied to the copy. The copy is always the state
of the store at one revision, which may be slightly stale: the watch delivers whole revisions, in
order.

Must always hold: `look` never returns a mixture of two revisions, and never an older revision than
before; after `distrust` it returns what was written by then.

Source of the idea: the reflector of Kubernetes' client-go (list, then watch from there).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from zero_orchestrator.errors import StoreUnavailable
from zero_orchestrator.store.kv import Change, KeyValue, KeyValueStore, Range


class Replica:
    """The keys under one prefix. `look` is for one thread; changes arrive on one of the store."""

    def __init__(self, store: KeyValueStore, prefix: str, on_change: Callable[[], None]) -> None:
        """Read the keys, and watch them from that revision.

        Args:
            store: A store whose calls end in bounded time.
            prefix: Prefix of the keys to copy.
            on_change: Called on a thread of the store after each change.

        Raises:
            StoreUnavailable: The store did not answer; nothing is being watched.
        """
        self._store = store
        self._prefix = prefix
        self._on_change = on_change
        self._lock = threading.Lock()
        self._items: dict[str, KeyValue] = {}
        self._range: Range | None = None
        self._revision = -1
        self._stale = False
        self._back: tuple[int, int] | None = None
        self._read()
        self._watch = store.watch(
            prefix, self._apply, after=self._revision, on_compacted=self._lost_track
        )

    def look(self) -> Range:
        """The keys as of one revision; the same object until something has changed.

        Raises:
            StoreUnavailable: The copy is stale, and the store did not answer.
        """
        if self._stale:
            self._read()
        with self._lock:
            if self._range is None:
                self._range = Range(self._revision, tuple(self._items.values()))
            return self._range

    def distrust(self) -> None:
        """Mark the copy as stale, after a write: the next `look` reads the keys from the store."""
        self._stale = True

    def went_back(self) -> tuple[int, int] | None:
        """From which revision, to which one, the store has gone back in time since the last call.

        A store that was restored from a copy has, and one that has lost its data.
        """
        with self._lock:
            back, self._back = self._back, None
        return back

    def close(self) -> None:
        """End the watch."""
        self._watch.cancel()

    def _read(self) -> None:
        self._stale = False  # before the read: a write during the read needs another one
        before = self._revision
        try:
            found = self._store.range(self._prefix)
        except StoreUnavailable:
            self._stale = True
            raise
        with self._lock:
            # The watch may be ahead of the read. A lower revision is of another store: start again.
            if found.revision < before:
                self._back = (before, found.revision)
            if found.revision > self._revision or found.revision < before:
                self._items = {item.key: item for item in found.items}
                self._revision, self._range = found.revision, None

    def _apply(self, changes: Sequence[Change]) -> None:
        with self._lock:
            for change in changes:
                if change.revision <= self._revision:
                    continue  # a read is ahead of the watch
                if change.item is None:
                    self._items.pop(change.key, None)
                else:
                    self._items[change.key] = change.item
            self._revision, self._range = max(self._revision, changes[-1].revision), None
        self._on_change()

    def _lost_track(self, revision: int) -> None:
        """The history is compacted, or is that of another store: read all keys again."""
        with self._lock:
            if revision < self._revision:
                self._back = (self._revision, revision)
            self._revision = min(self._revision, revision - 1)
        self._stale = True
        self._on_change()
