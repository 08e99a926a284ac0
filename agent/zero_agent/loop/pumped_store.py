"""A key-value store that handles the agent's events (pumps its event loop) while a call waits.

A call to etcd may take as long as its timeout, which is seconds if etcd hangs. The loop makes it
like any other call. The call runs on another thread, and until its answer is there the loop
continues to handle events: ends of workers, signals, limits.

Must always hold: an event handler makes no call to the store itself, since it would find the
caller's work half done; calls of other threads (the lease's keeper) pass straight through.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from zero_orchestrator.observe.pace import Histogram
from zero_orchestrator.store.kv import (
    NO_LEASE,
    Change,
    Compare,
    KeyValue,
    KeyValueStore,
    Range,
    Read,
    TxnResult,
    Watch,
    Write,
)

T = TypeVar("T")


class PumpedStore:
    """A `KeyValueStore` for the thread that makes this object."""

    def __init__(
        self, store: KeyValueStore, meanwhile: Callable[[], None], wake: Callable[[], None]
    ) -> None:
        """Nothing is called yet.

        Args:
            store: The store behind this one; must be thread-safe.
            meanwhile: Waits a moment for an event, and handles it. An exception of it ends the
                wait: the call continues alone, and its answer is dropped.
            wake: Called on another thread when an answer is there: `meanwhile` is to return.
        """
        self._store = store
        self._meanwhile = meanwhile
        self._wake = wake
        self._thread = threading.get_ident()
        self.durations = Histogram()
        """How long the answers took; may be read on any thread."""
        self._attends = True
        self._waits = False
        self._todo: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._todo = queue.SimpleQueue()
        threading.Thread(target=self._run, name="zero-store", daemon=True).start()

    def leave_alone(self) -> None:
        """Make calls directly from now on: no events are handled any more."""
        self._attends = False
        self._todo.put(None)

    def _run(self) -> None:
        while (todo := self._todo.get()) is not None:
            answer, call = todo
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

    def _call(self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        if not self._attends or threading.get_ident() != self._thread:
            return call(*args, **options)
        assert not self._waits, "a call to the store during another one"
        answer: Future[T] = Future()
        answer.add_done_callback(lambda _: self._wake())
        self._todo.put((answer, lambda: self._measured(call, *args, **options)))
        self._waits = True
        try:
            while not answer.done():
                self._meanwhile()
        finally:
            self._waits = False
        return answer.result()

    def _measured(self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        begin_s = time.monotonic()
        answer = call(*args, **options)
        self.durations = self.durations.add(time.monotonic() - begin_s)
        return answer

    def get(self, key: str) -> KeyValue | None:
        """As `KeyValueStore.get`."""
        return self._call(self._store.get, key)

    def range(self, prefix: str, *, limit: int = 0, oldest: bool = False) -> Range:
        """As `KeyValueStore.range`."""
        return self._call(self._store.range, prefix, limit=limit, oldest=oldest)

    def read(self, reads: Sequence[Read]) -> tuple[Range, ...]:
        """As `KeyValueStore.read`."""
        return self._call(self._store.read, reads)

    def put(self, key: str, value: str, *, lease: int = NO_LEASE) -> int:
        """As `KeyValueStore.put`."""
        return self._call(self._store.put, key, value, lease=lease)

    def delete(self, key: str) -> bool:
        """As `KeyValueStore.delete`."""
        return self._call(self._store.delete, key)

    def txn(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TxnResult:
        """As `KeyValueStore.txn`."""
        return self._call(self._store.txn, compares, writes)

    def grant(self, ttl_s: int) -> int:
        """As `KeyValueStore.grant`."""
        return self._call(self._store.grant, ttl_s)

    def keep_alive(self, lease: int) -> float:
        """As `KeyValueStore.keep_alive`."""
        return self._call(self._store.keep_alive, lease)

    def time_left(self, lease: int) -> float:
        """As `KeyValueStore.time_left`."""
        return self._call(self._store.time_left, lease)

    def revoke(self, lease: int) -> None:
        """As `KeyValueStore.revoke`."""
        self._call(self._store.revoke, lease)

    def watch(
        self,
        prefix: str,
        on_changes: Callable[[Sequence[Change]], None],
        *,
        after: int,
        cluster: int = 0,
        on_compacted: Callable[[int], None] | None = None,
    ) -> Watch:
        """As `KeyValueStore.watch`, which waits for nothing."""
        return self._store.watch(
            prefix, on_changes, after=after, cluster=cluster, on_compacted=on_compacted
        )

    def close(self) -> None:
        """As `KeyValueStore.close`."""
        self._store.close()
