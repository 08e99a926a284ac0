"""One stream of watches from one etcd server, and how its silence is noticed.

A stream may be silent because nothing happens, or because the server is stopped or the link is
dead. gRPC consumes the requests on a thread of its own; that thread asks for a sign of life when
nothing was heard for a while, and ends the stream when none comes.

Must always hold: a stream that is silent for `QUIET_S` and a deadline ends. Who calls it:
`etcd_watch`, which opens one stream at a time for all watches of a store.

Source of the idea: etcd's manual progress request (3.4 and later).
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from typing import Any

from zero_orchestrator.store.etcd_connection import Session, rpc

QUIET_S = 3.0
"""A sign of life is asked for when nothing was heard for so long."""

_NO_LEADER = ("hasleader", "true")
"""Asks a member that is cut off from the others to end the stream rather than to keep quiet."""


class Stream:
    """One call: requests from any thread, responses on one."""

    def __init__(self, session: Session, *, answer_s: float) -> None:
        """Open it.

        Args:
            session: The connection that it is part of.
            answer_s: Within this time something is heard after each request, or the stream ends.
        """
        self.session = session
        self.silent = False
        """It was ended because nothing was heard."""
        self._answer_s = answer_s
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._heard_s = time.monotonic()
        self._asked_s: float | None = None
        self._over = False
        self.token = session.login.token
        """With which it was opened."""
        self._call = rpc.WatchStub(session.client.channel).Watch(
            self._sent(), metadata=(*session.metadata, _NO_LEADER)
        )

    def ask(self, request: Any) -> None:
        """Send a request."""
        self._requests.put(request)

    def responses(self) -> Iterator[Any]:
        """What the server sends, until it ends or is ended. Raises grpc.RpcError."""
        try:
            for response in self._call:
                self._heard_s, self._asked_s = time.monotonic(), None
                self.session.heard()
                yield response
        finally:
            self.end()

    def end(self) -> None:
        """End the stream from any thread; `responses` raises CANCELLED."""
        self._over = True
        self._requests.put(None)
        self._call.cancel()

    # ---- gRPC's sending thread ----

    def _sent(self) -> Iterator[Any]:
        while (request := self._next()) is not None:
            # That a watch is gone already is no answer: cancelling it may have none.
            if self._asked_s is None and not request.HasField("cancel_request"):
                self._asked_s = time.monotonic()
            yield request

    def _next(self) -> Any:
        """The next request, if need be one for a sign of life; None when the stream is over."""
        while not self._over:
            asked_s = self._asked_s
            due_s = self._heard_s + QUIET_S if asked_s is None else asked_s + self._answer_s
            if (left_s := due_s - time.monotonic()) > 0:
                try:
                    return self._requests.get(timeout=left_s)
                except queue.Empty:
                    continue
            if asked_s is None:
                return rpc.WatchRequest(progress_request=rpc.WatchProgressRequest())
            self.silent = True
            self.end()
        return None
