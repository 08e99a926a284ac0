"""An agent's registration: its record among the live nodes of a job, under a lease."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from zero_contract.clock import Clock
from zero_contract.journal import Journal
from zero_orchestrator.errors import LeaseLost, StoreError, TakenForGone
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

        `on_lost` is called when the lease is lost, and `works` before each refresh: both on the
        thread of the lease's keeper, as is what `durations` gets to know of the store.
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
        """Lease of the record; NO_LEASE before the first `write`."""
        return self._keeper.lease if self._keeper is not None else NO_LEASE

    @property
    def lost(self) -> bool:
        """The lease has ended since the last `write`: others may treat this agent as dead."""
        return self._lost.is_set()

    def change(self, **facts: Any) -> int:
        """Change fields of the record; returns the revision of the write.

        Raises as `write`: then `node` is as before, and the caller sees that it is not done.
        """
        before, self.node = self.node, dataclasses.replace(self.node, **facts)
        try:
            return self.write()
        except StoreError:
            self.node = before
            raise

    def write(self) -> int:
        """(Re-)register under a live lease; returns the revision of the write.

        Raises:
            StoreUnavailable: The store did not answer.
            TakenForGone: The lease had ended, unnoticed; the next `write` takes a new one. Not this
                one: first the caller makes sure that this is the store that knew the lease.
        """
        # Only here, and not where the loss is noticed: the caller has read the job meanwhile, and
        # seen whether others have evicted this agent.
        if self._keeper is None or self.lost:
            before = self._keeper
            self._lost.clear()  # before there is the new keeper, which may lose its lease at once
            if before is not None:
                before.close()
            try:
                self._keeper = LeaseKeeper(
                    self._store,
                    self._ttl_s,
                    clock=self._clock,
                    on_lost=self._lease_lost,
                    on_silent=self._durations.silent,
                    on_heard=self._durations.heard,
                    works=self._works,
                )
            except StoreError:
                self._lost.set()  # the next poll tries again, and need not find that it is gone
                raise
            if before is not None:
                # Whatever the previous keeper reported last: the store answers, after a gap.
                self._durations.heard("a new lease was granted")
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

    def _lease_lost(self, reason: str) -> None:
        # A keeper on time never loses its lease: time was lost somewhere, maybe that of others too.
        self._durations.heard(reason)
        self._lost.set()
        self._journal.tell("lease", f"node {self.node.id} may be out: {reason}")
        self._on_lost()
