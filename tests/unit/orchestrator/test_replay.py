"""The same calls on memory and on a real etcd: what clients of a job do has one outcome on both.

Real agents' rendezvous run through a random life. Each call that they make is carried out on the
store in memory and on etcd, and the two answers must be equal, up to the numbers of leases and a
constant between the revisions.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import pytest

from tests.support.memory_store import MemoryStore
from tests.unit.orchestrator.test_rendezvous import Cluster
from zero_contract.worker import CommitRequest
from zero_orchestrator.errors import LeaseLost, StoreUnavailable
from zero_orchestrator.membership.job_state import Failure, State
from zero_orchestrator.store.etcd.client import EtcdStore
from zero_orchestrator.store.kv import KeyValue, Put

pytestmark = pytest.mark.etcd

LONG_S = 600
"""Time is the manual clock's: no lease of etcd ends by itself."""


class Twin(MemoryStore):
    """A store in memory that does everything on etcd as well, and compares."""

    def on(self, etcd: EtcdStore) -> Twin:
        self.etcd, self.leases = etcd, {0: 0}
        self.ahead = etcd.range("/").revision - self._shared.database.revision
        return self

    def client(self) -> Twin:
        client = type(self)(_shared=self._shared)
        client.etcd, client.leases, client.ahead = self.etcd, self.leases, self.ahead
        return client

    def theirs(self, item: KeyValue | None) -> KeyValue | None:
        if item is None:
            return None
        return replace(
            item,
            create_revision=item.create_revision + self.ahead,
            mod_revision=item.mod_revision + self.ahead,
            lease=self.leases[item.lease],
        )

    def get(self, key):
        found = super().get(key)
        assert self.etcd.get(key) == self.theirs(found)
        return found

    def range(self, prefix, **how):
        found, real = super().range(prefix, **how), self.etcd.range(prefix, **how)
        assert real.items == tuple(map(self.theirs, found.items))
        assert real.revision == found.revision + self.ahead
        return found

    def txn(self, compares, writes):
        shifted = [replace(c, revision=c.revision and c.revision + self.ahead) for c in compares]
        leased = [
            replace(w, lease=self.leases[w.lease]) if isinstance(w, Put) else w for w in writes
        ]
        try:
            done = super().txn(compares, writes)
        except LeaseLost:
            with pytest.raises(LeaseLost):
                self.etcd.txn(shifted, leased)
            raise
        real = self.etcd.txn(shifted, leased)
        assert (real.succeeded, real.revision) == (done.succeeded, done.revision + self.ahead)
        return done

    def grant(self, ttl_s):
        lease = super().grant(10**9)
        self.leases[lease] = self.etcd.grant(LONG_S)
        return lease

    def revoke(self, lease):
        super().revoke(lease)
        self.etcd.revoke(self.leases[lease])


class Life(Cluster):
    """Agents that try again what the store refused, as the agent's loop does."""

    def react(self, agent):
        with contextlib.suppress(StoreUnavailable):
            super().react(agent)


def live_on(cluster: Cluster, chance: random.Random, names: str) -> None:
    """One thing happens to one node."""
    name = chance.choice(names)
    agent = cluster.agents.get(name)
    if agent is None:
        cluster.join(name, incarnation=f"{chance.random()}")
        return
    cluster.react(agent)
    job = agent.snapshot
    match chance.randrange(8):
        case 0:
            cluster.kill(name)
            cluster.store.revoke(agent.lease)
        case 1:
            cluster.store.revoke(agent.lease)
        case 2 if job.state is State.ACTIVE and job.has_member(agent.node):
            agent.report_failure(job.n, Failure(node=name, symptom=False, summary="broke"))
        case 3:
            agent.commit(
                job.fence, CommitRequest(request=1, step=1, tag="t", digest="d", samples=1)
            )
        case _:
            cluster.settle(0.5)


@pytest.mark.parametrize("seed", range(3))
def test_a_life_of_a_job_has_the_same_outcomes_in_memory_and_on_etcd(seed, etcd_store, root):
    chance = random.Random(seed)
    cluster = Life(max_nodes=3, max_restarts=10**6)
    cluster.job = f"replay{root.replace('/', '-')}{chance.random()}"
    cluster.store = Twin(cluster.clock).on(etcd_store)
    for _ in range(10):  # how soon rounds follow depends on whose turn it is: on the job's name
        for _ in range(60):
            live_on(cluster, chance, "abcd")
        cluster.settle()
        for name in sorted(set("abcd") - set(cluster.agents)):
            cluster.join(name)
        cluster.settle()
        assert cluster.view.state is State.ACTIVE
        if cluster.view.n > 5:
            break
    assert cluster.view.n > 5
