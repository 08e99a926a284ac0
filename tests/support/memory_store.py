"""The store in memory: a `KeyValueStore` on an `mvcc.Database`, without etcd.

`client()` gives further clients of the same database, as several nodes have of one etcd.

Must always hold: a caller cannot tell it from etcd (`tests/contract/kv` runs against
both), with two freedoms: changes are delivered before the call that caused them returns (by
the calling thread, unless another thread is delivering), and a lease ends when the store is
next used after its time, or `expire` is called. Who calls it: tests and the simulator.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from tests.support.mvcc import Batch, Database, check_txn
from zero_contract.clock import Clock, SystemClock
from zero_orchestrator.errors import StoreUnavailable
from zero_orchestrator.store.kv import (
    NO_LEASE,
    Change,
    Compare,
    Delete,
    KeyValue,
    Put,
    Range,
    Read,
    TxnResult,
    Write,
)

__all__ = ["Database", "MemoryStore", "MemoryWatch"]

_log = logging.getLogger(__name__)

T = TypeVar("T")


class MemoryWatch:
    """A watch of a `MemoryStore`."""

    def __init__(
        self, prefix: str, on_changes: Callable[[Sequence[Change]], None], after: int
    ) -> None:
        self._prefix = prefix
        self._on_changes = on_changes
        self._after = after
        self.cancelled = False

    def cancel(self) -> None:
        """Deliver nothing more."""
        self.cancelled = True

    def offer(self, batch: Batch) -> None:
        """Deliver what this watch asked for."""
        wanted = tuple(
            change
            for change in batch
            if change.revision > self._after and change.key.startswith(self._prefix)
        )
        if wanted:
            self._on_changes(wanted)


@dataclasses.dataclass(slots=True)
class _Shared:
    """What all clients of one database share; every field is guarded by `lock`."""

    database: Database
    clock: Clock
    lock: threading.RLock = dataclasses.field(default_factory=threading.RLock)
    watches: list[MemoryWatch] = dataclasses.field(default_factory=list)
    outbox: deque[tuple[MemoryWatch, Callable[[], None]]] = dataclasses.field(default_factory=deque)
    delivering: bool = False
    earliest_end: float = -float("inf")
    """No lease ends before, as last looked: saves looking at all of them at each use."""


class MemoryStore:
    """A client of a database in this process; thread-safe."""

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        database: Database | None = None,
        _shared: _Shared | None = None,
    ) -> None:
        """A client of `database`, or of a new one, whose leases end by `clock`."""
        self._shared = _shared or _Shared(database or Database(), clock or SystemClock())
        self._watches: list[MemoryWatch] = []
        self._closed = False

    def client(self) -> MemoryStore:
        """Another client of the same database; closing one leaves the others alone."""
        return MemoryStore(_shared=self._shared)

    def clone(self) -> MemoryStore:
        """A store of its own with the same keys, leases, revisions and clock; no watches."""
        with self._shared.lock:
            return MemoryStore(self._shared.clock, database=self._shared.database.clone())

    def __deepcopy__(self, memo: dict[int, object]) -> MemoryStore:
        return self.clone()

    # ---- keys ----

    def get(self, key: str) -> KeyValue | None:
        """As `KeyValueStore.get`."""
        return self._use(lambda database: database.items.get(key))

    def range(self, prefix: str, *, limit: int = 0) -> Range:
        """As `KeyValueStore.range`."""
        return self._use(lambda database: database.range(prefix, limit=limit))

    def read(self, reads: Sequence[Read]) -> tuple[Range, ...]:
        """As `KeyValueStore.read`."""
        return self._use(lambda database: database.read(reads))

    def put(self, key: str, value: str, *, lease: int = NO_LEASE) -> int:
        """As `KeyValueStore.put`."""
        return self.txn([], [Put(key, value, lease)]).revision

    def delete(self, key: str) -> bool:
        """As `KeyValueStore.delete`."""
        return self._use(lambda database: bool(self._publish(database.write([Delete(key)]))))

    def txn(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TxnResult:
        """As `KeyValueStore.txn`."""
        check_txn(compares, writes)
        return self._use(lambda database: database.txn(compares, writes, self._publish))

    # ---- leases ----

    def grant(self, ttl_s: int) -> int:
        """As `KeyValueStore.grant`."""
        now = self._shared.clock.now()

        def grant(database: Database) -> int:
            self._shared.earliest_end = min(self._shared.earliest_end, now + ttl_s)
            return database.grant(ttl_s, now)

        return self._use(grant)

    def keep_alive(self, lease: int) -> float:
        """As `KeyValueStore.keep_alive`."""
        now = self._shared.clock.now()
        return self._use(lambda database: database.keep_alive(lease, now))

    def time_left(self, lease: int) -> float:
        """As `KeyValueStore.time_left`."""
        now = self._shared.clock.now()
        return self._use(lambda database: max(0.0, database.leases.get(lease, (0, now))[1] - now))

    def revoke(self, lease: int) -> None:
        """As `KeyValueStore.revoke`."""
        self._use(lambda database: self._publish(database.end(lease)))

    def expire(self) -> None:
        """End the leases whose time is over by the clock, as any other call does first."""
        self._use(lambda database: None)

    # ---- watches ----

    def watch(
        self,
        prefix: str,
        on_changes: Callable[[Sequence[Change]], None],
        *,
        after: int,
        cluster: int = 0,
        on_compacted: Callable[[int], None] | None = None,
    ) -> MemoryWatch:
        """As `KeyValueStore.watch`; the callback may use the store."""
        watch = MemoryWatch(prefix, on_changes, after)

        def start(database: Database) -> None:
            if after + 1 < database.compacted:
                if on_compacted is not None:
                    revision = database.revision
                    self._shared.outbox.append((watch, lambda: on_compacted(revision)))
            else:
                for batch in database.since(after):
                    self._send(watch, batch)
            self._shared.watches.append(watch)
            self._watches.append(watch)

        self._use(start)
        return watch

    def compact(self, revision: int) -> None:
        """Forget the changes before `revision`, as etcd's compaction does."""
        self._use(lambda database: database.compact(revision))

    def close(self) -> None:
        """As `KeyValueStore.close`."""
        self._closed = True
        for watch in self._watches:
            watch.cancel()

    # ---- one use at a time; deliveries in order, outside the lock ----

    def _use(self, action: Callable[[Database], T]) -> T:
        if self._closed:
            raise StoreUnavailable("this store is closed")
        try:
            with self._shared.lock:
                self._expire()
                return action(self._shared.database)
        finally:
            self._deliver()

    def _expire(self) -> None:
        shared, now = self._shared, self._shared.clock.now()
        if now < shared.earliest_end:
            return
        for lease in shared.database.ended(now):
            self._publish(shared.database.end(lease))
        shared.earliest_end = shared.database.earliest_end()

    def _publish(self, batch: Batch) -> Batch:
        self._shared.watches = [watch for watch in self._shared.watches if not watch.cancelled]
        for watch in self._shared.watches if batch else ():
            self._send(watch, batch)
        return batch

    def _send(self, watch: MemoryWatch, batch: Batch) -> None:
        self._shared.outbox.append((watch, lambda: watch.offer(batch)))

    def _deliver(self) -> None:
        """Empty the outbox; a second thread, or a callback, leaves it to whoever is at it."""
        shared = self._shared
        while True:
            with shared.lock:
                if shared.delivering or not shared.outbox:
                    return
                watch, deliver = shared.outbox.popleft()
                shared.delivering = True
            try:
                if not watch.cancelled:
                    deliver()
            except Exception:
                _log.exception("a watch's callback failed")
            finally:
                with shared.lock:
                    shared.delivering = False
