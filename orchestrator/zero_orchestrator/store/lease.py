"""Keep a lease alive, as the proof that this node is alive, and report when that is uncertain.

If the store answers that the lease has ended, the lease is *lost*: other nodes have seen this node
leave, and it must register again. If the store does not answer, the node is *silent*: other nodes
may or may not see it (an outage of the store pauses every lease). A silent node may continue to
compute and must not publish. The keeper retries until the lease is lost, or closed.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from enum import StrEnum

from zero_contract.clock import Clock, SystemClock
from zero_orchestrator.errors import LeaseLost, StoreError
from zero_orchestrator.store.kv import KeyValueStore

_log = logging.getLogger(__name__)


class LeaseState(StrEnum):
    """State of a lease, as far as its holder knows."""

    HELD = "held"
    SILENT = "silent"
    """The store does not answer; the lease may or may not have ended."""
    LOST = "lost"
    """The store answered that the lease has ended."""
    CLOSED = "closed"


def phase(lease: int) -> float:
    """The phase of a lease's refresh as a share of the period, in (0, 1]: even over a fleet."""
    # A hash, because consecutive lease ids are not spread evenly.
    digest = hashlib.sha256(f"{lease:x}".encode()).digest()
    return (int.from_bytes(digest[:4], "big") + 1) / 2**32


def _ignore(reason: str) -> None: ...


class LeaseKeeper:
    """Grants one lease and keeps it alive until it is lost or closed.

    Callbacks run on the clock's thread for this keeper and must not block.
    """

    def __init__(
        self,
        store: KeyValueStore,
        ttl_s: int,
        *,
        on_lost: Callable[[str], None],
        on_silent: Callable[[str], None] = _ignore,
        on_heard: Callable[[str], None] = _ignore,
        works: Callable[[], bool] = lambda: True,
        clock: Clock | None = None,
    ) -> None:
        """Grant the lease and start to refresh it.

        Args:
            store: A store whose calls end in bounded time.
            ttl_s: Time to live: the lease ends this many seconds after the last refresh.
            on_lost: Called once with the reason when the store answers that the lease has ended.
            on_silent: Called with the reason when the store stops answering.
            on_heard: Called with the length of the outage when the store answers again.
            works: Called before each refresh; returns whether the holder of the lease makes
                progress. While it returns False the lease is not refreshed, so that other nodes do
                not wait for a process of which only the threads are alive.
            clock: Paces the refreshes.

        Raises:
            StoreUnavailable: No lease could be granted.
        """
        self._store = store
        self._ttl_s = ttl_s
        self._callbacks = {LeaseState.LOST: on_lost, LeaseState.SILENT: on_silent}
        self._on_heard = on_heard
        self._works = works
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self.state = LeaseState.HELD
        """The present state of the lease."""
        self._confirmed = self._clock.now()  # before the grant, which takes time of the lease
        self.lease = store.grant(ttl_s)
        """The id of the lease, for `KeyValueStore.put`."""
        # A phase of its own: a fleet that starts together does not load the store all at once.
        self._phase_s = phase(self.lease) * self._ttl_s / 3
        self._repeating = self._clock.repeat(self._beat, self._phase_s)

    @property
    def unconfirmed_s(self) -> float:
        """Seconds since the store last confirmed the lease; above `ttl_s` it may have ended."""
        # Since that refresh was sent, so this node never takes the lease for valid longer than the
        # store does.
        return self._clock.now() - self._confirmed

    def close(self) -> None:
        """Revoke the lease: others see at once that this node has left; safe to call twice."""
        # First the state: a refresh that is under way then calls nobody back.
        was = self._move(LeaseState.CLOSED)
        self._repeating.cancel()
        if was in (LeaseState.HELD, LeaseState.SILENT):
            try:  # once, within the store's timeout: if that fails, the lease expires
                self._store.revoke(self.lease)
            except StoreError as error:
                _log.info(
                    "the lease could not be revoked and expires in %d s: %s", self._ttl_s, error
                )

    def _beat(self) -> float | None:
        """Send one keep-alive; returns the seconds until the next, None if the lease is lost."""
        if not self._works():  # others take the node for gone, and do not wait for it
            return self._ttl_s / 3
        sent = self._clock.now()
        try:
            self._store.keep_alive(self.lease)
        except LeaseLost as error:
            self._enter(LeaseState.LOST, str(error))
        except StoreError as error:
            self._enter(LeaseState.SILENT, str(error))
        except Exception as error:  # no thread or descriptor left: a retry may get one
            _log.exception("a keep-alive could not be sent")
            self._enter(LeaseState.SILENT, f"a keep-alive could not be sent: {error!r}")
        else:
            silent_s, self._confirmed = self.unconfirmed_s, sent
            if self._move(LeaseState.HELD) is LeaseState.SILENT:
                _call_back(self._on_heard, f"the store answers again, after {silent_s:.1f} s")
                # The end of the outage has brought all holders into step: back to the own phase.
                return self._phase_s
        return _PAUSES[self.state] * self._ttl_s if self.state in _PAUSES else None

    def _enter(self, state: LeaseState, reason: str) -> None:
        if self._move(state) not in (state, *_FINAL):
            _call_back(self._callbacks[state], reason)

    def _move(self, state: LeaseState) -> LeaseState:
        """Enter a state unless the present one is final; returns the state before."""
        with self._lock:
            before = self.state
            if before not in _FINAL or state is LeaseState.CLOSED:
                self.state = state
            return before


def _call_back(callback: Callable[[str], None], reason: str) -> None:
    """Call back, and log what the callback raises."""
    # The caller is the thread that refreshes the lease: it has to go on.
    try:
        callback(reason)
    except Exception:
        _log.exception("a callback of the lease keeper failed")


_FINAL = (LeaseState.LOST, LeaseState.CLOSED)

_PAUSES = {LeaseState.HELD: 1 / 3, LeaseState.SILENT: 1 / 10}
"""Time until the next refresh, as a share of the time to live. A failed refresh has used a third
of it already (the store's deadline for a keep-alive), so the next ones follow quickly."""
