"""A key-value store that handles the agent's events (pumps its event loop) while a call waits.

A call to etcd takes seconds if etcd hangs. It runs on another thread, and until its answer is there
the loop continues to handle events: ends of workers, signals, limits.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from zero_orchestrator.observe.pace import Histogram
from zero_orchestrator.store.kv import KeyValueStore, Watch

T = TypeVar("T")


def _pumped(method: str) -> Callable[..., Any]:
    """A method of `KeyValueStore`, which handles events while it waits."""

    def call(self: PumpedStore, *args: Any, **options: Any) -> Any:
        return self._call(getattr(self._store, method), *args, **options)

    return call


class PumpedStore:
    """A `KeyValueStore` for the thread that makes this object."""

    def __init__(
        self, store: KeyValueStore, meanwhile: Callable[[], None], wake: Callable[[], None]
    ) -> None:
        """Nothing is called yet; the store must be thread-safe.

        `meanwhile` waits a moment for an event, and handles it; its exception ends the wait, and
        the answer is dropped. `wake`, on another thread, lets it return when an answer is there.
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
        # The thread ends after the call that is under way, whose answer nobody takes.
        self._todo.put(None)

    def _run(self) -> None:
        while (todo := self._todo.get()) is not None:
            answer, call = todo
            # Whatever is raised belongs to the caller; this thread serves the next call.
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

    def _call(self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        # The thread that keeps the lease calls as well: it handles no events.
        if not self._attends or threading.get_ident() != self._thread:
            return call(*args, **options)
        # An event handler that calls the store would find the caller's work half done.
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

    get = _pumped("get")
    range = _pumped("range")
    read = _pumped("read")
    put = _pumped("put")
    delete = _pumped("delete")
    txn = _pumped("txn")
    grant = _pumped("grant")
    keep_alive = _pumped("keep_alive")
    time_left = _pumped("time_left")
    revoke = _pumped("revoke")

    def watch(self, *args: Any, **options: Any) -> Watch:
        """As `KeyValueStore.watch`, which waits for nothing."""
        return self._store.watch(*args, **options)

    def close(self) -> None:
        """As `KeyValueStore.close`."""
        self._store.close()
