"""Suspected neighbours in the ring: which to evict at once, which once their lease confirms it.

A suspicion may come from the network: a firewall that rejects looks like a process that has ended.
The lease is the counter-evidence: no node is evicted whose lease was refreshed after the suspicion
arose. A dead node is evicted after about a second; its lease takes 2 to 3.5 s to expire.
"""

from __future__ import annotations

from contextlib import suppress
from enum import StrEnum

from zero_agent.loop.limits import STORE_FAILS
from zero_contract.clock import Clock
from zero_contract.journal import Journal
from zero_orchestrator.membership.job_state import Node
from zero_orchestrator.membership.rendezvous import Rendezvous

COARSE_S = 1.0
"""Etcd reports the time left of a lease in whole seconds, rounded down."""


class LeaseVerdict(StrEnum):
    """What the readings of a lease show about a suspicion."""

    UNKNOWN = "unknown"
    ALIVE = "alive"
    DEAD = "dead"


class Suspicion:
    """The readings of one lease since a suspicion arose; the caller supplies the times."""

    def __init__(self, ttl_s: float, since_s: float) -> None:
        """Nothing has been read yet."""
        self._ttl_s = ttl_s
        self._since_s = self._asked_s = since_s
        self._refreshed_by_s = float("inf")
        """The last refresh was not after this time."""

    def judge(self, left_s: float, asked_s: float, answered_s: float) -> LeaseVerdict:
        """Judge with one more reading; `left_s` is rounded down to whole seconds."""
        age_s = self._ttl_s - left_s  # an upper bound; at least COARSE_S less
        if asked_s - age_s > self._since_s:
            return LeaseVerdict.ALIVE
        by_s = answered_s - (age_s - COARSE_S)
        may_be_new = age_s - COARSE_S < answered_s - self._asked_s  # refreshed between two readings
        self._refreshed_by_s = by_s if may_be_new else min(self._refreshed_by_s, by_s)
        self._asked_s = asked_s
        # A live agent refreshes its lease every third of the time to live.
        silent = answered_s - self._refreshed_by_s >= self._ttl_s / 2
        return (
            LeaseVerdict.DEAD
            if silent and self._refreshed_by_s <= self._since_s
            else LeaseVerdict.UNKNOWN
        )


class Suspects:
    """The neighbours that the ring has reported, until each is evicted or cleared."""

    def __init__(self, journal: Journal, clock: Clock) -> None:
        self._journal = journal
        self._clock = clock
        self._dead: list[Node] = []
        self._suspects: dict[Node, Suspicion] = {}

    def add(self, node: Node, certain: bool) -> None:
        """Record that the ring no longer reaches this node, whose death may be certain."""
        if certain:
            self._dead.append(node)
        # A node that was evicted on suspicion and came back alive is not evicted so again:
        # evidence that misleads costs each agent process one restart at most.
        elif not node.evicted and node not in self._suspects:
            self._suspects[node] = Suspicion(node.lease_ttl_s, self._clock.now())

    def run(self, rdzv: Rendezvous) -> None:
        """Evict the nodes that are certainly dead; read the leases of the others."""
        with suppress(*STORE_FAILS):  # the leases of the dead will expire
            while self._dead:
                self._evict(rdzv, self._dead.pop(), "its process has ended", ended=True)
            for node, suspicion in list(self._suspects.items()):
                asked_s = self._clock.now()
                left_s = rdzv.lease_left_s(node)
                found = (
                    suspicion.judge(left_s, asked_s, self._clock.now())
                    if left_s is not None
                    else LeaseVerdict.ALIVE  # the node has left, or has come back
                )
                if found is LeaseVerdict.UNKNOWN:
                    continue
                del self._suspects[node]
                if found is LeaseVerdict.DEAD:
                    why = "its port refuses, and its lease is not kept alive"
                    self._evict(rdzv, node, why, ended=False)
                elif left_s is not None:
                    self._journal.tell(
                        "ring",
                        f"node {node.id} keeps its lease alive although {node.ring} refuses "
                        "connections from here: it is not removed; does a firewall reject them?",
                    )

    def _evict(self, rdzv: Rendezvous, node: Node, why: str, *, ended: bool) -> None:
        if rdzv.evict(node, ended=ended):
            self._journal.tell("dead", f"the agent of node {node.id} is gone: {why}")
