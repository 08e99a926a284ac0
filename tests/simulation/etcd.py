"""A simulated etcd cluster and its clients, with the product's interface `KeyValueStore`.

The data are an `mvcc.Database`, the same that the model checker uses. What is added is what a
client sees of a cluster that is not in its own process: latency, lost requests and answers (the
outcome of a write is then unknown), a leader that is lost and found, a store that is full or slow,
watches that lag behind each other, break, resume and find their history compacted, leases that a
new leader extends, and a restore from an earlier copy.

Must always hold: a call ends within its deadline; the changes that one watch delivers are in order,
each once, all of a revision together. `test_etcd_model` compares it with a real etcd.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tests.simulation.kernel import Kernel, Process
from tests.simulation.network import ETCD, Network
from tests.support.mvcc import Batch, Database, check_txn
from tests.support.versions import Change as RecordChange
from tests.support.versions import written_by
from zero_orchestrator.errors import StoreError, StoreFull, StoreUnavailable
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

TIMEOUT_S = 5.0
"""As the agents' stores have it."""
EXPIRY_S = 0.5
"""How often etcd looks for leases that have ended."""
RECONNECT_S = 0.3
"""The longest pause before a broken watch is resumed."""
NOTICE_S = 8.0
"""A watch that hears nothing is broken off after this time: QUIET_S and a deadline of the client.
"""

Apply = Callable[[Database], Any]
Observer = Callable[[Batch, Database], None]


class Etcd:
    """The cluster."""

    def __init__(self, kernel: Kernel, network: Network) -> None:
        self.kernel, self.network = kernel, network
        self.database = Database()
        self.cluster = 0xE7CD
        self.leads = True
        """Whether there is a leader; without one nothing is read or written."""
        self.full = False
        self.slow_s = 0.0
        """Each request takes up to so much longer."""
        self.watches: list[SimulatedWatch] = []
        self.observers: list[Observer] = []
        self.on_restore: Callable[[Database], None] = lambda database: None
        self._draw = kernel.random("etcd")
        self._waiting: list[Callable[[], None]] = []
        self._copy: Database | None = None
        kernel.after(EXPIRY_S, self._expire)

    # ---- faults ----

    def lose_leader(self, for_s: float) -> None:
        """No leader for this time; the next one extends every lease, as etcd's lessor does."""
        if not self.leads:
            return
        self.leads = False
        self.kernel.after(for_s, self._elect)

    def _elect(self) -> None:
        self.leads = True
        now, database = self.kernel.now, self.database
        database.leases = {lease: (ttl, now + ttl) for lease, (ttl, _) in database.leases.items()}
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            if self._draw.random() < 0.5:  # the others were proposed to the old leader
                self.kernel.after(0.0, request)
        for watch in self.watches:
            watch.break_off(self._draw.uniform(0, RECONNECT_S))

    def compact(self) -> None:
        """Forget the history, as etcd's automatic compaction does."""
        self.database.compact(self.database.revision)

    def copy(self) -> None:
        """Keep a copy, for `restore`."""
        self._copy = self.database.clone()

    def restore(self, *, new_cluster: bool) -> None:
        """Go back in time, to the copy."""
        assert self._copy is not None
        granted, self.database = self.database.granted, self._copy.clone()
        self.database.granted = granted  # etcd's numbers of leases contain the time
        self.cluster += new_cluster
        self.on_restore(self.database)
        self._elect()

    # ---- serving ----

    def serve(self, apply: Apply, answer: Callable[[Any], None]) -> None:
        """Carry out a request that has arrived; `answer` receives the result, or an error."""

        def carry_out() -> None:
            if not self.leads:
                self._waiting.append(carry_out)
                return
            try:
                found = apply(self.database)
            except StoreError as error:
                found = error
            answer(found)

        self.kernel.after(self._draw.uniform(0, self.slow_s) if self.slow_s else 0.0, carry_out)

    def publish(self, batch: Batch) -> None:
        """Tell watches and observers of a revision."""
        if not batch:
            return
        for watch in list(self.watches):
            watch.offer(batch)
        for observer in self.observers:
            observer(batch, self.database)

    def _expire(self) -> None:
        database = self.database
        if self.leads and database.earliest_end() <= self.kernel.now:
            for lease in database.ended(self.kernel.now):
                self.publish(database.end(lease))
        self.kernel.after(EXPIRY_S, self._expire)


class SimulatedWatch:
    """A running watch."""

    def __init__(
        self,
        store: SimulatedStore,
        prefix: str,
        on_changes: Callable[[Sequence[Change]], None],
        after: int,
        cluster: int,
        on_compacted: Callable[[int], None] | None,
    ) -> None:
        self._store, self._etcd, self.prefix = store, store.etcd, prefix
        self._on_changes, self._on_compacted = on_changes, on_compacted
        self.after, self._cluster = after, cluster
        self._sent = after
        """The last revision that is on its way or has arrived."""
        self._stream = 0
        """Number of the present stream; what is on its way on an older one is lost."""
        self._open = False
        self._on_the_way: deque[Callable[[], None]] = deque()
        """What is on its way on the present stream, in order."""
        self._arrives_s = 0.0
        self.cancelled = False

    def cancel(self) -> None:
        """Deliver nothing more."""
        self.cancelled = True
        if self in self._etcd.watches:
            self._etcd.watches.remove(self)

    def break_off(self, again_s: float) -> None:
        """End the stream; another one resumes after this time."""
        self._stream += 1
        self._open = False
        self._on_the_way.clear()
        self._store.later(again_s, self.resume)

    def resume(self) -> None:
        """Open a stream, and send what was missed."""
        if self.cancelled or self._open:
            return
        etcd, database = self._etcd, self._etcd.database
        if not (etcd.leads and self._store.reaches(both=True)):
            self._store.later(RECONNECT_S, self.resume)
            return
        self._open = True
        known = self._cluster
        self._cluster = etcd.cluster
        lost = known not in (0, etcd.cluster) or database.revision < self.after
        if lost or self.after + 1 < database.compacted:
            self.after = self._sent = revision = database.revision
            if self._on_compacted is not None:
                self._arrive(lambda: self._on_compacted and self._on_compacted(revision))
            return
        self._sent = self.after
        for batch in database.since(self.after):
            self.offer(batch)

    def offer(self, batch: Batch) -> None:
        """Send the part of a revision that this watch has asked for."""
        if not self._open or batch[0].revision <= self._sent:
            return
        wanted = tuple(change for change in batch if change.key.startswith(self.prefix))
        if not wanted:
            return
        self._sent = batch[0].revision

        def deliver() -> None:
            self.after = wanted[0].revision
            self._on_changes(wanted)

        self._arrive(deliver)

    def _arrive(self, deliver: Callable[[], None]) -> None:
        """Deliver after the latency of the network, in order, if the stream lives until then."""
        kernel, stream = self._etcd.kernel, self._stream
        arrives_s = kernel.now + self._store.latency_s() + self._store.lag_s()
        # A stream is in order: what comes at the same time as the one before comes after it.
        self._arrives_s = max(arrives_s, self._arrives_s + 1e-9)
        self._on_the_way.append(deliver)

        def arrive() -> None:
            if self.cancelled or stream != self._stream:
                return
            if self._store.reaches(both=True):
                self._on_the_way.popleft()()  # events of a slow process come in another order
            else:
                self.break_off(NOTICE_S)

        self._store.later(self._arrives_s - kernel.now, arrive)


class SimulatedStore:
    """A client of the cluster, for the tasks of one process."""

    def __init__(
        self,
        etcd: Etcd,
        process: Process,
        node: str,
        timeout_s: float = TIMEOUT_S,
        *,
        words: RecordChange | None = None,
    ):
        """A client; with `words`, it writes records as another version does."""
        self.etcd, self._process, self._node = etcd, process, node
        self._kernel = etcd.kernel
        self._timeout_s = timeout_s
        self._words = words
        self._draw = etcd.kernel.random(f"store of {process.name}")
        self._closed = False
        self._watches: list[SimulatedWatch] = []
        self._ttl_s: dict[int, float] = {}

    # ---- the network ----

    def later(self, seconds: float, work: Callable[[], None]) -> None:
        """Run `work` later, in this process."""
        self._kernel.after(seconds, work, self._process)

    def latency_s(self) -> float:
        """The time of one message."""
        return self.etcd.network.latency_s(self._node, ETCD)

    def lag_s(self) -> float:
        """How much longer a watch needs: now and then much longer."""
        return self._draw.expovariate(1 / 0.2) if self._draw.random() < 0.05 else 0.0

    def reaches(self, *, both: bool = False) -> bool:
        """Whether messages arrive at etcd (and, with `both`, its messages here)."""
        network = self.etcd.network
        there = network.delivers(self._node, ETCD)
        return there and (not both or network.delivers(ETCD, self._node))

    def _call(self, apply: Apply, timeout_s: float | None = None) -> Any:
        """Send a request, and wait for its answer.

        Raises:
            StoreUnavailable: No answer in time; the request may have been carried out.
        """
        if self._closed:
            raise StoreUnavailable("this store is closed")
        kernel, network = self._kernel, self.etcd.network
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        me, until_s, came = kernel.current, kernel.now + limit_s, []
        assert me is not None

        def receive(found: Any) -> None:
            came.append(found)
            kernel.wake(me)

        def answer(found: Any) -> None:
            if network.delivers(ETCD, self._node) and not network.loses():
                kernel.after(self.latency_s(), lambda: receive(found), self._process)

        def arrive() -> None:
            if network.delivers(self._node, ETCD) and not network.loses():
                self.etcd.serve(apply, answer)

        kernel.after(self.latency_s(), arrive)
        while not came and kernel.now < until_s:
            kernel.park(until_s - kernel.now)
        if not came:
            raise StoreUnavailable(f"etcd has not answered within {limit_s:g} s")
        if isinstance(found := came[0], StoreError):
            raise found
        return found

    # ---- the calls ----

    def get(self, key: str) -> KeyValue | None:
        """As `KeyValueStore.get`."""
        found: KeyValue | None = self._call(lambda database: database.items.get(key))
        return found

    def range(self, prefix: str, *, limit: int = 0) -> Range:
        """As `KeyValueStore.range`."""
        found: Range = self._call(
            lambda database: database.range(prefix, limit=limit, cluster=self.etcd.cluster)
        )
        return found

    def read(self, reads: Sequence[Read]) -> tuple[Range, ...]:
        """As `KeyValueStore.read`."""
        found: tuple[Range, ...] = self._call(
            lambda database: database.read(reads, cluster=self.etcd.cluster)
        )
        return found

    def put(self, key: str, value: str, *, lease: int = NO_LEASE) -> int:
        """As `KeyValueStore.put`."""
        return self.txn([], [Put(key, value, lease)]).revision

    def delete(self, key: str) -> bool:
        """As `KeyValueStore.delete`."""

        def carry_out(database: Database) -> bool:
            batch = database.write([Delete(key)])
            self.etcd.publish(batch)
            return bool(batch)

        found: bool = self._call(carry_out)
        return found

    def txn(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TxnResult:
        """As `KeyValueStore.txn`."""
        check_txn(compares, writes)
        if (words := self._words) is not None:
            writes = [written_by(words, write) for write in writes]

        def carry_out(database: Database) -> TxnResult:
            if self.etcd.full and any(isinstance(write, Put) for write in writes):
                raise StoreFull("etcdserver: mvcc: database space exceeded")
            return database.txn(compares, writes, self.etcd.publish)

        found: TxnResult = self._call(carry_out)
        return found

    def grant(self, ttl_s: int) -> int:
        """As `KeyValueStore.grant`."""
        lease: int = self._call(lambda database: database.grant(ttl_s, self._kernel.now))
        self._ttl_s[lease] = ttl_s
        return lease

    def keep_alive(self, lease: int) -> float:
        """As `KeyValueStore.keep_alive`; its deadline is a third of the time to live."""
        limit_s = min(self._timeout_s, self._ttl_s.get(lease, 3 * self._timeout_s) / 3)
        left_s: float = self._call(
            lambda database: database.keep_alive(lease, self._kernel.now), limit_s
        )
        return left_s

    def time_left(self, lease: int) -> float:
        """As `KeyValueStore.time_left`: whole seconds, rounded down."""

        def left(database: Database) -> float:
            ends_s = database.leases.get(lease, (0, self._kernel.now))[1]
            return max(0.0, math.floor(ends_s - self._kernel.now))

        left_s: float = self._call(left)
        return left_s

    def revoke(self, lease: int) -> None:
        """As `KeyValueStore.revoke`."""
        self._call(lambda database: self.etcd.publish(database.end(lease)))

    def watch(
        self,
        prefix: str,
        on_changes: Callable[[Sequence[Change]], None],
        *,
        after: int,
        cluster: int = 0,
        on_compacted: Callable[[int], None] | None = None,
    ) -> SimulatedWatch:
        """As `KeyValueStore.watch`."""
        watch = SimulatedWatch(self, prefix, on_changes, after, cluster, on_compacted)
        self._watches.append(watch)
        self.etcd.watches.append(watch)
        self.later(self.latency_s(), watch.resume)
        return watch

    def close(self) -> None:
        """As `KeyValueStore.close`."""
        self._closed = True
        for watch in self._watches:
            watch.cancel()
