"""One agent among the live nodes of a job: its record there, under a lease that it keeps alive.

Must always hold: the record goes when the agent does, within the time to live of the lease at the
latest; a lease that was lost is replaced only in `write`, so whoever has read the job in between
knows that this agent may have been taken for dead.

Called by `rendezvous`.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from zero_contract.clock import Clock
from zero_contract.journal import Journal
from zero_orchestrator.errors import LeaseLost, TakenForGone
from zero_orchestrator.membership.durations import Durations
from zero_orchestrator.membership.job_state import Node
from zero_orchestrator.store.kv import NO_LEASE, KeyValueStore
from zero_orchestrator.store.lease import LeaseKeeper


class Registration:
    """This agent's record in the store."""

    def __init__(
        self,
        store: KeyValueStore,
        key: str,
        node: Node,
        ttl_s: int,
        *,
        clock: Clock,
        durations: Durations,
        journal: Journal,
        on_lost: Callable[[], None],
        works: Callable[[], bool],
    ) -> None:
        """Nothing is written before `write`.

        Args:
            store: Shared by all agents of the job.
            key: Of the record.
            node: This agent.
            ttl_s: Of the lease.
            clock: Of the lease's keeper.
            durations: Told when the store is silent, and when it is heard again.
            journal: Told when the lease is lost.
            on_lost: Called then, on the thread of the lease's keeper.
            works: Whether this agent does; the lease is not refreshed while it does not.
        """
        self._store = store
        self._key = key
        self._ttl_s = ttl_s
        self._clock = clock
        self._durations = durations
        self._journal = journal
        self._on_lost = on_lost
        self._works = works
        self._keeper: LeaseKeeper | None = None
        self._lost = threading.Event()
        self.node = node
        """This agent as it is, or is about to be, registered."""

    @property
    def lease(self) -> int:
        """Under which it is registered."""
        return self._keeper.lease if self._keeper is not None else NO_LEASE

    @property
    def lost(self) -> bool:
        """The lease has ended since the last `write`: the others may take this agent for dead."""
        return self._lost.is_set()

    def change(self, **facts: Any) -> int:
        """Say something else of this agent; the revision of it. Raises as `write`."""
        self.node = dataclasses.replace(self.node, **facts)
        return self.write()

    def write(self) -> int:
        """(Re-)register under a lease that is alive; the revision of it.

        Raises:
            StoreUnavailable: The store did not answer.
            TakenForGone: The lease had ended, unnoticed; the next `write` takes a new one. Not this
                one: first the caller makes sure that this is the store that knew the lease.
        """
        if self._keeper is None or self.lost:
            self._keeper = self._new_keeper(self._keeper)
        try:
            return self._store.put(self._key, self.node.to_json(), lease=self._keeper.lease)
        except LeaseLost:
            self._lost.set()
            raise TakenForGone(
                "its lease had run out: this process stood still, or was cut off"
            ) from None

    def close(self) -> None:
        """Leave: the other agents see it at once."""
        if self._keeper is not None:
            self._keeper.close()

    def _new_keeper(self, before: LeaseKeeper | None) -> LeaseKeeper:
        self._lost.clear()
        if before is not None:
            before.close()
        keeper = LeaseKeeper(
            self._store,
            self._ttl_s,
            clock=self._clock,
            on_lost=self._lease_lost,
            on_silent=self._durations.silent,
            on_heard=self._durations.heard,
            works=self._works,
        )
        if before is not None:
            # Whatever the keeper before it last said: the store answers, after a gap.
            self._durations.heard("a new lease was granted")
        return keeper

    def _lease_lost(self, reason: str) -> None:
        self._durations.heard(
            reason
        )  # a keeper on time never loses its lease: time was lost somewhere
        self._lost.set()
        self._journal.tell("lease", f"node {self.node.id} may be out: {reason}")
        self._on_lost()
