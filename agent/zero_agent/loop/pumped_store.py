"""A store whose calls do not keep the agent's loop from what happens meanwhile.

A call to etcd may take as long as its timeout, seconds if etcd stands still. The loop makes it like
any other call; it runs on another thread, and until the answer is there the loop goes on with
what arrives: ends of workers, signals, limits.

Must always hold: what goes on meanwhile makes no call itself, since it would find the caller's work
half done; calls of other threads (the lease's keeper) pass straight through.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

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
            store: What is called; must be thread-safe.
            meanwhile: Waits a moment for something that happens, and goes on with it. What it
                raises ends the wait: the call goes on alone, and nobody hears its answer.
            wake: Called on another thread when an answer is there: `meanwhile` is to return.
        """
        self._store = store
        self._meanwhile = meanwhile
        self._wake = wake
        self._thread = threading.get_ident()
        self._attends = True
        self._waits = False
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="zero-store", daemon=True).start()

    def leave_alone(self) -> None:
        """From now on calls are made as usual: nothing is to go on any more."""
        self._attends = False
        self._todo.put(None)

    def _run(self) -> None:
        while (call := self._todo.get()) is not None:
            call()

    def _call(self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        if not self._attends or threading.get_ident() != self._thread:
            return call(*args, **options)
        assert not self._waits, "a call to the store during another one"
        answer: Future[T] = Future()
        answer.add_done_callback(lambda _: self._wake())
        self._todo.put(lambda: _answer(answer, lambda: call(*args, **options)))
        self._waits = True
        try:
            while not answer.done():
                self._meanwhile()
        finally:
            self._waits = False
        return answer.result()

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
        on_compacted: Callable[[int], None] | None = None,
    ) -> Watch:
        """As `KeyValueStore.watch`, which waits for nothing."""
        return self._store.watch(prefix, on_changes, after=after, on_compacted=on_compacted)

    def close(self) -> None:
        """As `KeyValueStore.close`."""
        self._store.close()


def _answer(answer: Future[T], call: Callable[[], T]) -> None:
    try:
        answer.set_result(call())
    except BaseException as error:
        answer.set_exception(error)
