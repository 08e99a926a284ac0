"""A lease kept alive: the proof that this node is here, and the news when it is not certain.

The lease is refreshed at every third of its time to live, each holder's at a place of its own in
that period: a fleet that starts together, or that an outage has brought into step, does not ask the
store all at once. Two things can go wrong, and they are
told apart. The store says that the lease has ended: it is *lost*, others have seen this node
go. Or the store does not answer: the node is *silent*, perhaps for others as well, perhaps for
nobody (an outage of the store pauses every lease). A silent node may go on computing and must
not publish; a lost one has to register again.

Must always hold: `on_lost` is called at most once, and never after `close`; the keeper tries on
until one of the two. Who calls it: the rendezvous, once for each registration.
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
    """What this node knows about its lease."""

    HELD = "held"
    SILENT = "silent"
    """The store does not answer: the lease may or may not have ended."""
    LOST = "lost"
    """The store said that the lease has ended."""
    CLOSED = "closed"


def phase(lease: int) -> float:
    """Where in a period the refresh of this lease falls, in (0, 1]: evenly spread over a fleet.

    Stores number their leases, so the number itself says nothing of that.
    """
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
        """The lease is granted, and being kept alive, when this returns.

        Args:
            store: Each of its calls must end in bounded time.
            ttl_s: The lease ends so many seconds after the last refresh.
            on_lost: Told why, once, when the store says that the lease has ended.
            on_silent: Told why, when the store stops answering.
            on_heard: Told for how long it was silent, when the store answers again.
            works: Asked before each refresh whether the holder of the lease does what it is for.
                While it does not, nothing is refreshed: the others shall not wait for a process
                whose threads alone are alive.
            clock: Paces the refreshes.

        Raises:
            StoreUnavailable: No lease could be granted.
        """
        self._store = store
        self._ttl_s = ttl_s
        self._told = {LeaseState.LOST: on_lost, LeaseState.SILENT: on_silent}
        self._on_heard = on_heard
        self._works = works
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._state = LeaseState.HELD
        self._confirmed = self._clock.now()
        self._lease = store.grant(ttl_s)
        self._phase_s = phase(self._lease) * self._ttl_s / 3
        self._repeating = self._clock.repeat(self._beat, self._phase_s)

    @property
    def lease(self) -> int:
        """The id of the lease, for `KeyValueStore.put`."""
        return self._lease

    @property
    def state(self) -> LeaseState:
        """What is known about the lease now."""
        return self._state

    @property
    def unconfirmed_s(self) -> float:
        """Seconds since the store last confirmed the lease; above `ttl_s` it may have ended.

        Counted from when the confirmed refresh was *sent*, so this node never believes in its
        lease for longer than the store does.
        """
        return self._clock.now() - self._confirmed

    def close(self) -> None:
        """End the lease, so that others see at once that this node is gone; safe to call twice.

        Revoking is tried once, within the store's timeout; if that fails the lease ends by
        itself.
        """
        was = self._move(LeaseState.CLOSED)
        self._repeating.cancel()
        if was in (LeaseState.HELD, LeaseState.SILENT):
            try:
                self._store.revoke(self._lease)
            except StoreError as error:
                _log.info("the lease ends by itself in %d s: %s", self._ttl_s, error)

    def _beat(self) -> float | None:
        """Refresh once; returns the seconds until the next refresh, None when it is over."""
        if not self._works():
            return self._ttl_s / 3
        sent = self._clock.now()
        try:
            self._store.keep_alive(self._lease)
        except LeaseLost as error:
            self._enter(LeaseState.LOST, str(error))
        except StoreError as error:
            self._enter(LeaseState.SILENT, str(error))
        except Exception as error:  # no thread, no descriptor: the next try may find one
            _log.exception("a keep-alive could not be sent")
            self._enter(LeaseState.SILENT, f"a keep-alive could not be sent: {error!r}")
        else:
            silent_s, self._confirmed = self.unconfirmed_s, sent
            if self._move(LeaseState.HELD) is LeaseState.SILENT:
                _tell(self._on_heard, f"the store answers again, after {silent_s:.1f} s")
                return self._phase_s
        return _PAUSES[self._state] * self._ttl_s if self._state in _PAUSES else None

    def _enter(self, state: LeaseState, reason: str) -> None:
        if self._move(state) not in (state, *_FINAL):
            _tell(self._told[state], reason)

    def _move(self, state: LeaseState) -> LeaseState:
        """Go to a state unless one of the final ones is reached; returns the state before."""
        with self._lock:
            before = self._state
            if before not in _FINAL or state is LeaseState.CLOSED:
                self._state = state
            return before


def _tell(callback: Callable[[str], None], reason: str) -> None:
    """A mistake in a callback must not stop the refreshes."""
    try:
        callback(reason)
    except Exception:
        _log.exception("a callback of the lease keeper failed")


_FINAL = (LeaseState.LOST, LeaseState.CLOSED)

_PAUSES = {LeaseState.HELD: 1 / 3, LeaseState.SILENT: 1 / 10}
"""Until the next refresh, as a share of the time to live. A failed refresh has used up a third
of it already (the store's deadline for it), so the next ones follow quickly."""
