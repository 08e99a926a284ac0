"""Watches on etcd that survive restarts and failover of servers: one stream for all of a store.

etcd keeps the history of its keys, so a watch that remembers the last revision it delivered can
resume right after that revision, at any member. Three things end a stream: the connection breaks;
the stream is silent; the store has failed over to another connection. Each time the reading thread
opens the next stream, with all watches, after a random backoff that grows while attempts fail.
Changes are delivered in order, each once, all changes of a revision in one batch.

Source of the ideas: the Go client's watcher (go.etcd.io/etcd/client/v3/watch.go); etcd's manual
progress request (3.4 and later).
"""

from __future__ import annotations

import itertools
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from zero_orchestrator.errors import StoreError, StoreUnavailable
from zero_orchestrator.store import retry
from zero_orchestrator.store.etcd.connection import Connection, EtcdSession, rpc
from zero_orchestrator.store.kv import Change, KeyValue

_log = logging.getLogger(__name__)

QUIET_S = 3.0
"""A progress request is sent after this many seconds without a response."""

_NO_LEADER = ("hasleader", "true")
"""gRPC metadata: a member without a leader (a partition) ends the stream instead of stalling."""

_RESUME_PAUSE_S = 0.1
"""Upper limit of the random pause, seconds, before a broken stream is resumed (jitter)."""

_SHORT_LIFE_S = 2.0
"""A stream that ends within this many seconds counts as a failed attempt: the backoff grows."""


def key_range(prefix: str) -> tuple[bytes, bytes]:
    """The (key, range_end) of etcd for every key that starts with `prefix`."""
    if not prefix:
        return b"\0", b"\0"
    key = prefix.encode()
    return key, key[:-1] + bytes([key[-1] + 1])  # no byte of UTF-8 is 0xff


def key_value(kv: Any) -> KeyValue:
    """Convert a KeyValue message of etcd."""
    key, value = kv.key.decode(), kv.value.decode()
    return KeyValue(key, value, kv.create_revision, kv.mod_revision, kv.lease)


class Stream:
    """One watch stream: requests from any thread, responses on one thread."""

    def __init__(self, session: EtcdSession, *, answer_s: float) -> None:
        """Open the stream; it ends if no response follows a request within `answer_s` seconds."""
        self.session = session
        self.silent = False
        """Whether the stream was ended because no response came."""
        self._answer_s = answer_s
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._received_s = time.monotonic()
        self._asked_s: float | None = None
        self._over = False
        self._call = rpc.WatchStub(session.client.channel).Watch(
            self._sent(), metadata=(*session.metadata, _NO_LEADER)
        )

    def ask(self, request: Any) -> None:
        """Send a request."""
        self._requests.put(request)

    def responses(self) -> Iterator[Any]:
        """Yield what the server sends, until the stream ends. Raises grpc.RpcError."""
        try:
            for response in self._call:
                self._received_s, self._asked_s = time.monotonic(), None
                self.session.note_answer()
                yield response
        finally:
            self.end()

    def end(self) -> None:
        """End the stream from any thread; `responses` raises CANCELLED."""
        self._over = True
        self._requests.put(None)  # wakes the sending thread, which gRPC does not
        self._call.cancel()

    # ---- gRPC's sending thread ----

    def _sent(self) -> Iterator[Any]:
        """Yield the requests, and progress requests on a silent stream, until the stream ends."""
        while not self._over:
            asked_s = self._asked_s
            due_s = self._received_s + QUIET_S if asked_s is None else asked_s + self._answer_s
            if (left_s := due_s - time.monotonic()) > 0:
                try:
                    request = self._requests.get(timeout=left_s)
                except queue.Empty:
                    continue
                if request is None:
                    return
            elif asked_s is None:
                request = rpc.WatchRequest(progress_request=rpc.WatchProgressRequest())
            else:  # a stopped server or a dead link does not answer a progress request, either
                self.silent = True
                self.end()
                return
            # A request to cancel a watch that has ended already may get no answer.
            if self._asked_s is None and not request.HasField("cancel_request"):
                self._asked_s = time.monotonic()
            yield request


class EtcdWatch:
    """A running watch."""

    def __init__(
        self,
        watches: EtcdWatches,
        prefix: str,
        on_changes: Callable[[Sequence[Change]], None],
        *,
        after: int,
        cluster: int,
        on_compacted: Callable[[int], None] | None,
    ) -> None:
        """As `KeyValueStore.watch`; the watch runs after `EtcdWatches.add`."""
        self.prefix = prefix
        self.after = after
        """The last revision that was delivered."""
        self.cluster = cluster
        """The id of the cluster whose revision that is; 0: none has answered yet."""
        self.cancelled = False
        self._watches = watches
        self._on_changes = on_changes
        self._on_compacted = on_compacted

    def cancel(self) -> None:
        """End the watch: no callback is called afterwards."""
        self.cancelled = True
        self._watches.remove(self)

    def deliver(self, events: Sequence[Any]) -> None:
        """Call back with the changes that were not delivered before."""
        new = []
        for event in events:
            # Before 3.6.2 a watch that begins in the future may be sent older ones (etcd#20221).
            if event.kv.mod_revision > self.after:
                item = None if event.type == rpc.Event.DELETE else key_value(event.kv)
                new.append(Change(event.kv.key.decode(), event.kv.mod_revision, item))
        if new:
            self.after = new[-1].revision
            self._call_back(self._on_changes, new)

    def skip_to(self, after: int) -> None:
        """Skip the history up to a revision; the `on_compacted` callback reads the keys again."""
        self.after = after
        if self._on_compacted is not None:
            self._call_back(self._on_compacted, after)

    def _call_back(self, callback: Callable[[Any], None], news: Any) -> None:
        if self.cancelled:
            return
        try:
            callback(news)
        except Exception:  # that must not end the watches of others
            _log.exception("a callback of the watch of %s failed", self.prefix)


class EtcdWatches:
    """The watches of one store, on one thread, which the first watch starts."""

    def __init__(self, connection: Connection, on_open: Callable[[], None]) -> None:
        """Nothing is sent before the first watch; `on_open` is called after each first answer."""
        self._connection = connection
        self._on_open = on_open
        self._lock = threading.Condition()
        self._ids = itertools.count(1)
        self._watches: dict[int, EtcdWatch] = {}
        self._stream: Stream | None = None
        self._reported = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watches", daemon=True)

    def add(self, watch: EtcdWatch) -> None:
        """Start a watch."""
        with self._lock:
            if self._thread.ident is None:
                self._thread.start()
            self._begin(watch)
            self._lock.notify()

    def remove(self, watch: EtcdWatch) -> None:
        """Stop a watch; no error if it is not running."""
        with self._lock:
            number = next((n for n, running in self._watches.items() if running is watch), None)
            if number is not None:
                self._end(number)
            if self._stream is not None and not self._watches:
                self._stream.end()

    def resume(self) -> None:
        """End the stream; the thread opens another on the store's present connection."""
        if (stream := self._stream) is not None:
            stream.end()

    def close(self, timeout_s: float) -> None:
        """End all watches, and wait for the thread to end."""
        with self._lock:
            for watch in self._watches.values():
                watch.cancelled = True
            self._watches.clear()
            self._closed.set()
            self._lock.notify()
        self.resume()
        # A callback of a watch, which runs on that thread, may close the store.
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _begin(self, watch: EtcdWatch) -> None:
        """Give a watch a new id, and create it on the stream if there is one."""
        # A new one at each restart: responses under the old id may still be on their way.
        number = next(self._ids)
        self._watches[number] = watch
        if self._stream is not None:
            self._stream.ask(_create_request(number, watch))

    def _end(self, number: int) -> None:
        del self._watches[number]
        if self._stream is not None:
            cancel = rpc.WatchCancelRequest(watch_id=number)
            self._stream.ask(rpc.WatchRequest(cancel_request=cancel))

    # ---- the thread ----

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._watches or self._closed.is_set())
                if self._closed.is_set():
                    return
            try:
                retry.until_set(self._closed)(self._follow)
            except Exception as error:
                # Told once, however often the same error comes; the thread goes on in any case.
                if not self._closed.is_set() and str(error) != self._reported:
                    self._reported = str(error)
                    watches = list(self._watches.values())
                    prefixes = ", ".join(sorted({watch.prefix for watch in watches}))
                    trace = None if isinstance(error, StoreError) else error
                    _log.error("the watch of %s does not work: %s", prefixes, error, exc_info=trace)
                self._closed.wait(retry.LONGEST_WAIT_S)
            self._closed.wait(random.uniform(0, _RESUME_PAUSE_S))

    def _follow(self) -> None:
        """Open a stream with all watches, and read it to its end.

        Raises:
            StoreUnavailable: The server did not accept the watches, or ended the stream at once.
            StoreRefused: The server refused one of the watches.
        """
        connection = self._connection
        stream = Stream(connection.logged_in(), answer_s=connection.timeout_s)
        with self._lock:
            self._stream = stream
            for number, watch in self._watches.items():
                stream.ask(_create_request(number, watch))
            if not self._watches:  # the last one was cancelled while the stream was opened
                stream.end()
        started = time.monotonic()
        try:
            for number, response in enumerate(stream.responses()):
                self._take(response, stream)
                # The first answer shows that the server takes the watches: which version is it?
                if number == 0:
                    self._on_open()
            failure: StoreError = StoreUnavailable("the server ended the stream")
        except grpc.RpcError as error:
            session = stream.session
            if error.code() is not grpc.StatusCode.CANCELLED:
                failure = connection.failed(session, error)
            else:
                if stream.silent:
                    connection.give_up(session)
                text = f"the stream from etcd at {session.endpoint} was given up"
                failure = StoreUnavailable(text)
        finally:
            stream.end()
        # A stream that has lived is resumed at once, without the backoff of `retry`.
        if self._watches and time.monotonic() - started < _SHORT_LIFE_S:
            raise failure

    # ---- responses ----

    def _take(self, response: Any, stream: Stream) -> None:
        number = response.watch_id
        watch = self._watches.get(number)
        if response.canceled and not response.compact_revision and (watch or number < 0):
            # etcd refuses an expired token with the text for a user without the permission. Reads
            # of the same keys tell them apart: they log in again, or are refused themselves.
            for each in list(self._watches.values()):
                self._store_revision(each)
            text = f"etcd at {stream.session.endpoint} ended a watch: {response.cancel_reason}"
            raise StoreUnavailable(text)
        if watch is None:
            return  # a progress response, or one for a watch that was cancelled
        other, watch.cluster = watch.cluster, response.header.cluster_id
        if response.compact_revision or other not in (0, watch.cluster):
            self._restart(number, watch, self._store_revision(watch))
        elif response.created and response.header.revision < watch.after:
            # This member is behind the watch: does it lag, or is the history lost?
            if (revision := self._store_revision(watch)) < watch.after:
                self._restart(number, watch, revision)
        else:
            watch.deliver(response.events)

    def _restart(self, number: int, watch: EtcdWatch, after: int) -> None:
        """Restart a watch whose history is compacted or lost."""
        watch.skip_to(after)
        with self._lock:
            if number in self._watches:
                self._end(number)
                self._begin(watch)

    def _store_revision(self, watch: EtcdWatch) -> int:
        """The present revision, by a linearizable read. Raises StoreError."""
        key, end = key_range(watch.prefix)
        request = rpc.RangeRequest(key=key, range_end=end, limit=1, keys_only=True)
        found = self._connection.call(
            lambda etcd: etcd.kvstub.Range(request, etcd.timeout, metadata=etcd.metadata),
            repeatable=True,
        )
        return int(found.header.revision)


def _create_request(number: int, watch: EtcdWatch) -> Any:
    key, end = key_range(watch.prefix)
    create = rpc.WatchCreateRequest(
        key=key, range_end=end, start_revision=watch.after + 1, watch_id=number
    )
    return rpc.WatchRequest(create_request=create)
