"""Etcd's data model as a plain value: keys with revisions, leases, and the history of changes.

No locks, no threads, no clock: times are handed in. Cheap to clone, so a model checker can
branch over its states.

Must always hold: whatever a caller can observe here it can observe on etcd, down to revisions
and the order of changes (`tests/contract/kv` runs against both). Who calls it:
`kv_memory`, and the model checker.

Source of the model: https://etcd.io/docs/v3.5/learning/data_model/
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from zero_orchestrator.errors import LeaseLost, StoreRefused
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

MAX_TXN_OPERATIONS = 128
"""etcd's default `--max-txn-ops`, for comparisons and for writes."""

Batch = tuple[Change, ...]
"""The changes of one revision."""


@dataclasses.dataclass(slots=True)
class Database:
    """Keys with revisions, leases, and the changes since `compacted`; times are handed in."""

    revision: int = 1  # of an empty etcd
    items: dict[str, KeyValue] = dataclasses.field(default_factory=dict)
    leases: dict[int, tuple[int, float]] = dataclasses.field(default_factory=dict)
    """Lease -> (time to live in seconds, when it ends)."""
    history: list[Batch] = dataclasses.field(default_factory=list)
    """The changes of each revision from `compacted` on."""
    compacted: int = 2
    """The first revision whose changes are still known."""
    granted: int = 0

    def clone(self) -> Database:
        """The same state, without its history: O(keys + leases), items are shared."""
        items, leases = dict(self.items), dict(self.leases)
        return Database(self.revision, items, leases, [], self.revision + 1, self.granted)

    def under(self, prefix: str) -> list[KeyValue]:
        """The keys that start with `prefix`, sorted."""
        return [self.items[key] for key in sorted(self.items) if key.startswith(prefix)]

    def holds(self, compare: Compare) -> bool:
        """Whether a comparison is true now."""
        item = self.items.get(compare.key)
        return (getattr(item, compare.field) if item else 0) == compare.revision

    def range(self, prefix: str, *, limit: int = 0, cluster: int = 0) -> Range:
        """The first keys that start with `prefix`, by name; without a limit, all."""
        return Range(self.revision, tuple(self.under(prefix)[: limit or None]), cluster)

    def read(self, reads: Sequence[Read], *, cluster: int = 0) -> tuple[Range, ...]:
        """What each of these reads finds, all at one revision."""
        found = (
            self.under(read.key) if read.prefix else filter(None, [self.items.get(read.key)])
            for read in reads
        )
        return tuple(
            Range(self.revision, tuple(items)[: read.limit or None], cluster)
            for read, items in zip(reads, found, strict=True)
        )

    def txn(
        self,
        compares: Sequence[Compare],
        writes: Sequence[Write],
        publish: Callable[[Batch], object],
    ) -> TxnResult:
        """Write if all comparisons are true, and publish the changes; raises as `write`."""
        succeeded = all(self.holds(compare) for compare in compares)
        if succeeded:
            publish(self.write(writes))
        return TxnResult(succeeded, self.revision)

    def write(self, writes: Sequence[Write]) -> Batch:
        """Apply all writes as one revision; a batch without changes is no revision.

        Raises:
            LeaseLost: A lease named by a put does not exist; nothing is written.
        """
        for write in writes:
            if isinstance(write, Put) and write.lease and write.lease not in self.leases:
                raise LeaseLost(f"lease {write.lease:x} has ended: {write.key} is not written")
        batch = tuple(change for write in writes for change in self._changes(write))
        if batch:
            self.revision += 1
            self.history.append(batch)
        return batch

    def since(self, after: int) -> Iterator[Batch]:
        """The batches after a revision that is not compacted."""
        return iter(self.history[max(0, after + 1 - self.compacted) :])

    def compact(self, revision: int) -> None:
        """Forget the changes before `revision`."""
        del self.history[: max(0, revision - self.compacted)]
        self.compacted = max(self.compacted, revision)

    def grant(self, ttl_s: int, now: float) -> int:
        """A new lease; its id."""
        self.granted += 1
        self.leases[self.granted] = (ttl_s, now + ttl_s)
        return self.granted

    def keep_alive(self, lease: int, now: float) -> float:
        """Let a lease end its time to live after `now`; returns that time, seconds."""
        if lease not in self.leases:
            raise LeaseLost(f"lease {lease:x} has ended")
        ttl_s, _ = self.leases[lease]
        self.leases[lease] = (ttl_s, now + ttl_s)
        return float(ttl_s)

    def end(self, lease: int) -> Batch:
        """End a lease; its keys go in one revision, in order of their names."""
        self.leases.pop(lease, None)
        held = sorted(item.key for item in self.items.values() if item.lease == lease)
        return self.write([Delete(key) for key in held]) if lease != NO_LEASE else ()

    def earliest_end(self) -> float:
        """No lease ends before; infinity without leases."""
        return min((ends for _, ends in self.leases.values()), default=float("inf"))

    def ended(self, now: float) -> list[int]:
        """The leases whose time is over, first ended first."""
        over = [(ends, lease) for lease, (_, ends) in self.leases.items() if ends <= now]
        return [lease for _, lease in sorted(over)]

    def _changes(self, write: Write) -> Iterator[Change]:
        revision = self.revision + 1
        if isinstance(write, Put):
            before = self.items.get(write.key)
            created = before.create_revision if before else revision
            item = KeyValue(write.key, write.value, created, revision, write.lease)
            self.items[write.key] = item
            yield Change(write.key, revision, item)
            return
        for key in self._named(write):
            del self.items[key]
            yield Change(key, revision, None)

    def _named(self, delete: Delete) -> list[str]:
        if delete.prefix:
            return [item.key for item in self.under(delete.key)]
        return [delete.key] if delete.key in self.items else []


def check_txn(compares: Sequence[Compare], writes: Sequence[Write]) -> None:
    """Raises StoreRefused for what etcd refuses, whatever the comparisons say."""
    if max(len(compares), len(writes)) > MAX_TXN_OPERATIONS:
        raise StoreRefused(f"a transaction has at most {MAX_TXN_OPERATIONS} operations")
    if not all(named.key for named in (*compares, *writes) if not _all_keys(named)):
        raise StoreRefused("a key must not be empty")
    puts = [write.key for write in writes if isinstance(write, Put)]
    deletes = [write for write in writes if isinstance(write, Delete)]
    if len(set(puts)) < len(puts) or any(_covers(d, key) for d in deletes for key in puts):
        raise StoreRefused(f"a transaction writes each key once, not {puts}, {deletes}")


def _all_keys(named: Compare | Write) -> bool:
    return isinstance(named, Delete) and named.prefix and not named.key


def _covers(delete: Delete, key: str) -> bool:
    return key.startswith(delete.key) if delete.prefix else key == delete.key
