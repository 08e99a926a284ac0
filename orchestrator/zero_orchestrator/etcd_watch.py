"""A watch on etcd that survives what happens to servers: one stream at a time, resumed.

etcd keeps the history of its keys, so a watch that remembers the last revision it delivered
can start again right after it, at any member. Four things end a stream: the connection breaks;
it is silent (a stopped server, a dead link: then not even a request for a sign of life is
answered); the store has found another connection; the history needed is compacted. Each time
the reading thread starts the next stream, after a random pause that grows while nothing works.

Must always hold: changes are delivered in order, each once, all changes of a revision in one
batch; the thread ends by `cancel` alone; no wait without an end. Who calls it: `etcd`.

Source of the idea: the Go client's watcher (go.etcd.io/etcd/client/v3/watch.go); the sign of
life is etcd's manual progress request (3.4 and later).
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from zero_orchestrator import retry
from zero_orchestrator.errors import Compacted, StoreError, StoreUnavailable
from zero_orchestrator.etcd_connection import Connection, Session, rpc
from zero_orchestrator.etcd_errors import store_error
from zero_orchestrator.kv import Change, KeyValue

_log = logging.getLogger(__name__)

_RESUME_PAUSE_S = 0.1
"""At most so long until a broken stream is resumed: random, so that agents do not come at once."""

_SHORT_LIFE_S = 2.0
"""A stream that breaks sooner counts as a failed try: the next one waits longer."""

_QUIET_S = 3.0
"""A sign of life is asked for when nothing was heard for so long."""

_NO_LEADER = ("hasleader", "true")
"""Asks a member that is cut off from the others to end the stream rather than to keep quiet."""


def key_range(prefix: str) -> tuple[bytes, bytes]:
    """The (key, range_end) for every key that starts with `prefix`."""
    if not prefix:
        return b"\0", b"\0"
    key = prefix.encode()
    return key, key[:-1] + bytes([key[-1] + 1])  # no byte of UTF-8 is 0xff


def _create_request(prefix: str, start_revision: int) -> Any:
    key, end = key_range(prefix)
    create = rpc.WatchCreateRequest(key=key, range_end=end, start_revision=start_revision)
    return rpc.WatchRequest(create_request=create)


def _change(event: Any) -> Change:
    deleted = event.type == rpc.Event.DELETE
    item = None if deleted else key_value(event.kv)
    return Change(event.kv.key.decode(), event.kv.mod_revision, item)


def key_value(kv: Any) -> KeyValue:
    """A KeyValue message of etcd as ours."""
    key, value = kv.key.decode(), kv.value.decode()
    return KeyValue(key, value, kv.create_revision, kv.mod_revision, kv.lease)


class _Stream:
    """One stream: a call, and the signs of life that gRPC's sending thread asks for.

    gRPC consumes the requests on a thread of its own; that thread asks for a sign of life when
    nothing was heard for a while, and cancels the call when none comes.
    """

    def __init__(self, session: Session, create: Any, *, answer_s: float) -> None:
        self.session = session
        self.silent = False
        self._heard_s = time.monotonic()
        self._heard = threading.Event()
        self._over = threading.Event()
        self._answer_s = answer_s
        self._call = rpc.WatchStub(session.client.channel).Watch(
            self._requests(create), metadata=(*session.metadata, _NO_LEADER)
        )

    def responses(self) -> Iterator[Any]:
        """What the server sends, until it ends or is ended. Raises grpc.RpcError."""
        try:
            for response in self._call:
                self._heard_s = time.monotonic()
                self._heard.set()
                yield response
        finally:
            self.end()

    def end(self) -> None:
        """End the stream from any thread; `responses` raises CANCELLED."""
        self._over.set()
        self._heard.set()
        self._call.cancel()

    def _requests(self, create: Any) -> Iterator[Any]:
        request = create
        while True:
            self._heard.clear()
            yield request
            if not self._heard.wait(self._answer_s):
                self.silent = True
                self.end()
            if not self._until_quiet():
                return
            request = rpc.WatchRequest(progress_request=rpc.WatchProgressRequest())

    def _until_quiet(self) -> bool:
        """Wait until nothing was heard for `_QUIET_S`; False when the stream is over."""
        while (left_s := self._heard_s + _QUIET_S - time.monotonic()) > 0:
            if self._over.wait(left_s):
                return False
        return not self._over.is_set()


class EtcdWatch:
    """A running watch, on a thread of its own."""

    def __init__(
        self,
        connection: Connection,
        prefix: str,
        on_changes: Callable[[Sequence[Change]], None],
        *,
        after: int,
        on_compacted: Callable[[int], None] | None,
    ) -> None:
        """As `KeyValueStore.watch`."""
        self._connection = connection
        self._prefix = prefix
        self._on_changes = on_changes
        self._on_compacted = on_compacted
        self._after = after
        self._reported = ""
        self._cancelled = threading.Event()
        self._stream: _Stream | None = None
        self._thread = threading.Thread(target=self._run, name=f"watch {prefix}", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Deliver nothing more."""
        self._cancelled.set()
        self.resume()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end after `cancel`."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def resume(self) -> None:
        """Leave the stream for one on the store's present connection."""
        if (stream := self._stream) is not None:
            stream.end()

    # ---- the thread ----

    def _run(self) -> None:
        while not self._cancelled.is_set():
            try:
                retry.until_set(self._cancelled)(self._follow)
            except Exception as error:
                self._report(error)
                self._cancelled.wait(retry.LONGEST_WAIT_S)
            self._cancelled.wait(random.uniform(0, _RESUME_PAUSE_S))

    def _follow(self) -> None:
        """Read one stream to its end.

        Raises:
            StoreUnavailable: The server did not accept the watch, or not for long.
            StoreRefused: The server said that it never will.
        """
        stream, started = self._open(), time.monotonic()
        try:
            for response in stream.responses():
                self._take(response, stream)
            failure: StoreError = StoreUnavailable("the server ended the stream")
        except Compacted:
            self._relist()
            return
        except grpc.RpcError as error:
            failure = self._ended(stream, error)
        finally:
            stream.end()
        if time.monotonic() - started < _SHORT_LIFE_S:
            raise failure

    def _open(self) -> _Stream:
        connection = self._connection
        create = _create_request(self._prefix, self._after + 1)
        stream = _Stream(connection.logged_in(), create, answer_s=connection.timeout_s)
        self._stream = stream
        if self._cancelled.is_set():  # `cancel` may have come before there was a stream to end
            stream.end()
        return stream

    def _ended(self, stream: _Stream, error: grpc.RpcError) -> StoreError:
        """What the end of a stream means; moves on if it was for want of an answer."""
        session = stream.session
        if error.code() is not grpc.StatusCode.CANCELLED:
            return self._connection.failed(session, error)
        if stream.silent:
            self._connection.give_up(session)
        return StoreUnavailable(f"the stream from etcd at {session.endpoint} was given up")

    def _report(self, error: Exception) -> None:
        if self._cancelled.is_set() or str(error) == self._reported:
            return
        self._reported = str(error)
        _log.error("the watch of %s does not work: %s", self._prefix, error, exc_info=error)

    # ---- what the server says ----

    def _take(self, response: Any, stream: _Stream) -> None:
        if response.compact_revision:
            raise Compacted(f"revision {self._after + 1} of {self._prefix} is compacted")
        if response.canceled:
            stream.session.token = None  # an expired token is refused in the same words
            raise store_error(None, response.cancel_reason, stream.session.endpoint)
        if response.created and response.header.revision < self._after:
            self._check_history()
        changes = [_change(event) for event in response.events]
        if new := [change for change in changes if change.revision > self._after]:
            self._after = new[-1].revision
            self._call_back(self._on_changes, new)

    def _check_history(self) -> None:
        """This member has not seen what we have: is it behind, or is the history lost?

        Raises:
            Compacted: The whole store is older than what we have seen: its data was replaced.
        """
        if (revision := self._store_revision()) < self._after:
            raise Compacted(f"the store went back from revision {self._after} to {revision}")

    def _relist(self) -> None:
        """Go on from the store's present revision; the caller reads the keys afresh."""
        self._after = self._store_revision()
        if self._on_compacted is not None:
            self._call_back(self._on_compacted, self._after)

    def _store_revision(self) -> int:
        """The present revision, as agreed by the members. Raises StoreError."""
        found = self._connection.call(
            lambda client: client.get_response(self._prefix or "\0"), repeatable=True
        )
        return int(found.header.revision)

    def _call_back(self, callback: Callable[[Any], None], news: Any) -> None:
        if self._cancelled.is_set():
            return
        try:
            callback(news)
        except Exception:
            _log.exception("a callback of the watch of %s failed", self._prefix)
