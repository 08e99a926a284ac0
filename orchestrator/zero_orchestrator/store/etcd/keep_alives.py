"""Lease keep-alives on one long-lived stream, for all leases of a store.

etcd3 opens a stream for each keep-alive; a thousand agents with leases of 3 s would open and close
a thousand streams a second. Thread-safe.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from typing import Any

import grpc

from zero_orchestrator.store.etcd.connection import Connection, EtcdSession, NoAnswer, rpc


class KeepAlives:
    """The stream of one connection, opened by the first keep-alive."""

    def __init__(self, connection: Connection) -> None:
        """Nothing is sent."""
        self._connection = connection
        self._lock = threading.Lock()
        self._stream: _Stream | None = None

    def refresh(self, lease: int, timeout_s: float) -> float:
        """Keep a lease alive; returns its new time to live in seconds, 0 if it has ended.

        Raises:
            StoreUnavailable, StoreRefused: As `Connection.call`.
        """

        def send(etcd: Any) -> float:
            # Not the `etcd` of this call: its copy of the client has no session to compare.
            session = self._connection.session
            with self._lock:
                stream = self._stream
                # Another session: the connection of this stream was abandoned.
                if stream is None or stream.over or stream.session is not session:
                    if stream is not None:
                        stream.end()
                    stream = self._stream = _Stream(session)
            return stream.ask(lease, etcd.timeout)

        return self._connection.call(send, repeatable=True, timeout_s=timeout_s)

    def close(self) -> None:
        """End the stream."""
        with self._lock:
            if self._stream is not None:
                self._stream.end()


class _Stream:
    """One keep-alive stream: requests from any thread, answers read on a thread of the stream."""

    def __init__(self, session: EtcdSession) -> None:
        self.session = session
        self.over = False
        self._changed = threading.Condition()
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._sent: Counter[int] = Counter()
        self._answered: Counter[int] = Counter()
        self._ttl_s: dict[int, float] = {}
        self._error: grpc.RpcError | None = None
        requests = iter(self._requests.get, None)  # None ends the requests
        stub = rpc.LeaseStub(session.client.channel)
        self._call = stub.LeaseKeepAlive(requests, metadata=session.metadata)
        threading.Thread(target=self._read, name="keep-alives", daemon=True).start()

    def ask(self, lease: int, timeout_s: float) -> float:
        """Refresh a lease; returns its new time to live in seconds.

        Raises:
            NoAnswer: No answer came in time; a late one does not count for the next request.
            grpc.RpcError: The stream has ended.
        """
        with self._changed:
            # Answers come in order: the n-th is that to the n-th request, and a late one to an
            # older request, which timed out, does not count.
            self._sent[lease] += 1
            number = self._sent[lease]
            self._requests.put(rpc.LeaseKeepAliveRequest(ID=lease))
            self._changed.wait_for(
                lambda: self._answered[lease] >= number or self.over, max(0.0, timeout_s)
            )
            if self._answered[lease] >= number:
                return self._ttl_s[lease]
            if self._error is not None:
                raise self._error
        raise NoAnswer("no answer to a keep-alive")

    def end(self) -> None:
        """End the stream, from any thread."""
        self._requests.put(None)
        self._call.cancel()

    def _read(self) -> None:
        error: grpc.RpcError | None = None
        try:
            for answer in self._call:
                with self._changed:
                    self._answered[answer.ID] += 1
                    self._ttl_s[answer.ID] = float(answer.TTL)
                    self._changed.notify_all()
        except grpc.RpcError as failure:
            error = failure
        with self._changed:
            self.over, self._error = True, error
            self._changed.notify_all()
        self._requests.put(None)  # ends gRPC's sending thread, which waits for requests
