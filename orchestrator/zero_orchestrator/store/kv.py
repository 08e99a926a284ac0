"""The key-value store as the orchestrator sees it: etcd v3's model in a few typed calls.

Keys and values are text. Every change of any key gets the next *revision* of the whole store;
a key carries the revision of its creation and of its last change. A transaction compares, then
writes, atomically. A key written with a lease vanishes when the lease is not kept alive. A
watch delivers every change after a given revision, in order, exactly once. `etcd.EtcdStore` and the
tests' `MemoryStore` pass one contract suite (`tests/contract/kv`).

Source of the model: the etcd v3 API (https://etcd.io/docs/v3.5/learning/api/).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

NO_LEASE = 0


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One key as stored at some revision."""

    key: str
    value: str
    create_revision: int
    mod_revision: int
    lease: int = NO_LEASE


@dataclass(frozen=True, slots=True)
class Range:
    """Keys under a prefix at one revision of the store, sorted by key unless asked otherwise."""

    revision: int
    items: tuple[KeyValue, ...]
    cluster: int = 0
    """The id of the cluster that answered, in which the revision counts; 0: there is one alone."""


@dataclass(frozen=True, slots=True)
class Read:
    """One read: of a key, or with `prefix` of every key that starts with it."""

    key: str
    prefix: bool = False
    limit: int = 0
    """Maximum number of keys, the first by name; 0: all."""


class Field(StrEnum):
    """The revision that a comparison looks at; a missing key compares as revision 0."""

    CREATE_REVISION = "create_revision"
    MOD_REVISION = "mod_revision"


@dataclass(frozen=True, slots=True)
class Compare:
    """`key`'s `field` must equal `revision` for the transaction to be carried out."""

    key: str
    field: Field
    revision: int


def absent(key: str) -> Compare:
    """The key must not exist."""
    return Compare(key, Field.CREATE_REVISION, 0)


def unchanged(key: str, mod_revision: int) -> Compare:
    """The key must not have changed since it was read; 0 means that it must not exist."""
    return Compare(key, Field.MOD_REVISION, mod_revision)


@dataclass(frozen=True, slots=True)
class Put:
    """Write a key."""

    key: str
    value: str
    lease: int = NO_LEASE


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a key, or with `prefix` every key that starts with it."""

    key: str
    prefix: bool = False


Write = Put | Delete


@dataclass(frozen=True, slots=True)
class TxnResult:
    """Whether the comparisons held, and the store's revision after the transaction."""

    succeeded: bool
    revision: int


@dataclass(frozen=True, slots=True)
class Change:
    """One watched change. `item` is None when the key was deleted."""

    key: str
    revision: int
    item: KeyValue | None


class Watch(Protocol):
    """A running watch."""

    def cancel(self) -> None:
        """Stop delivering; returns at once, safe to call twice and from the callback."""


class KeyValueStore(Protocol):
    """Every call ends within the store's timeout.

    Raises (every call):
        StoreUnavailable: No answer in time. The call may or may not have taken effect.
        StoreRefused: The server said no.
    """

    def get(self, key: str) -> KeyValue | None:
        """The key as it is now, or None."""

    def range(self, prefix: str, *, limit: int = 0) -> Range:
        """Every key that starts with `prefix`, read at one revision; or the first by name."""

    def read(self, reads: Sequence[Read]) -> tuple[Range, ...]:
        """Several reads in one call, all of one revision: a `Range` for each."""

    def put(self, key: str, value: str, *, lease: int = NO_LEASE) -> int:
        """Write a key; returns the revision of the write. Raises LeaseLost for a dead lease."""

    def delete(self, key: str) -> bool:
        """Delete a key; returns whether it existed."""

    def txn(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TxnResult:
        """Carry out all `writes` if all `compares` hold, else none. Raises LeaseLost as `put`."""

    def watch(
        self,
        prefix: str,
        on_changes: Callable[[Sequence[Change]], None],
        *,
        after: int,
        cluster: int = 0,
        on_compacted: Callable[[int], None] | None = None,
    ) -> Watch:
        """Deliver every change of keys under `prefix` with a revision greater than `after`.

        `cluster` is the one in which `after` counts; 0: whichever answers first.

        Batches arrive in order on a thread of the store; the callback must not block. After a lost
        connection the watch resumes without loss or repetition. If the history it needs is
        compacted away, or is not that of the cluster that answers now, `on_compacted` is called
        with the revision at which the watch resumes: the caller must read the keys again.
        """

    def grant(self, ttl_s: int) -> int:
        """A new lease that ends `ttl_s` seconds after its last keep-alive; returns its id."""

    def keep_alive(self, lease: int) -> float:
        """Refresh a lease; returns its new time to live, seconds. Raises LeaseLost."""

    def time_left(self, lease: int) -> float:
        """Seconds until a lease ends if nobody keeps it alive; 0 when it has ended."""

    def revoke(self, lease: int) -> None:
        """End a lease and delete its keys; no error if it has ended already."""

    def close(self) -> None:
        """Cancel the watches and close the connection; leases stay until they expire."""
