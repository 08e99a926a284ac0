"""Large jobs: who sees what, what it costs, and that any of those who see everything may die."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from copy import deepcopy

import pytest

from tests.support.manual_clock import ManualClock
from tests.support.memory_store import Database, MemoryStore
from tests.unit.orchestrator.test_rendezvous import Cluster
from zero_contract.worker import CommitRequest
from zero_orchestrator.errors import StoreRefused, StoreReplaced
from zero_orchestrator.membership.job_state import Failure, Members, Node, State, round_env
from zero_orchestrator.membership.job_view import REREAD_S
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.membership.parse import parse
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.store.kv import Delete, Put, Range
from zero_orchestrator.store.replica import Position, Replica

KEYS = Keys("job")
NAMES = tuple(f"n{index:02}" for index in range(12))


class CountingStore(MemoryStore):
    """Counts the keys that are read and the changes that are delivered, of all its clients."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.told: dict[str, int] = {"keys": 0, "changes": 0}

    def client(self):
        client = CountingStore(_shared=self._shared)
        client.told = self.told
        return client

    def range(self, prefix, **how):
        found = super().range(prefix, **how)
        self.told["keys"] += len(found.items)
        return found

    def watch(self, prefix, on_changes, **how):
        def count(changes):
            self.told["changes"] += len(changes)
            on_changes(changes)

        return super().watch(prefix, count, **how)


def running(names=NAMES, **spec) -> Cluster:
    """A job in its first round, on all of these nodes."""
    cluster = Cluster(min_nodes=1, max_nodes=len(names), max_restarts=9, **spec)
    cluster.store = CountingStore(cluster.clock)
    for name in names:
        cluster.join(name)
    cluster.settle()
    assert (cluster.view.state, len(cluster.view.members.nodes)) == (State.ACTIVE, len(names))
    return cluster


def whole(cluster: Cluster) -> list[str]:
    return sorted(name for name, agent in cluster.agents.items() if agent._job_view.whole)


def test_only_the_first_agents_see_everything_and_all_see_the_same_round():
    cluster = running()
    assert whole(cluster) == ["n00", "n01", "n02"]
    assert len({agent.snapshot.fence for agent in cluster.agents.values()}) == 1


def test_agents_that_arrive_before_the_first_take_their_places():
    cluster = Cluster(min_nodes=1, max_nodes=12)
    for name in reversed(NAMES):
        cluster.join(name)
    assert len(whole(cluster)) == 12, "each was the first of those there were"
    cluster.settle()
    assert whole(cluster) == ["n00", "n01", "n02"]


@pytest.mark.parametrize(
    "victims",
    [NAMES[:1], NAMES[:3], NAMES[:6], NAMES[2:11], NAMES[3:4]],
    ids=["one", "all three", "the first half", "all but three", "one outside"],
)
def test_whoever_dies_the_others_go_on_for_one_restart(victims):
    cluster = running()
    for name in victims:
        cluster.kill(name)
    cluster.settle()
    left = [name for name in NAMES if name not in victims]
    assert cluster.view.n == 2
    assert [node.id for node in cluster.view.members.nodes] == left
    charges = {cluster.agents[name].snapshot.charges for name in whole(cluster)}
    assert (whole(cluster), charges) == (left[:3], {1})


def test_the_first_ones_may_all_leave_at_once():
    cluster = running()
    for name in NAMES[:3]:
        cluster.agents[name].drain()
    for _ in range(30):
        cluster.settle(0.1)
        for name in NAMES[:3]:
            if name in cluster.agents and cluster.agents[name].snapshot.state is State.FORMING:
                cluster.agents.pop(name).close()
    cluster.settle()
    assert [node.id for node in cluster.view.members.nodes] == list(NAMES[3:])
    assert cluster.agents["n03"].snapshot.charges == 0


def test_an_agent_outside_reports_a_failure_and_learns_why_the_round_ended():
    cluster = running()
    cause = Failure(node="n07", symptom=False, summary="broke", traceback="Traceback: ...")
    cluster.agents["n07"].report_failure(1, cause)
    for name in NAMES[8:]:
        lost = Failure(node=name, symptom=True, summary="lost a peer")
        cluster.agents[name].report_failure(1, lost)
    for agent in cluster.agents.values():
        agent.poll()
    seen = cluster.agents["n11"].poll()
    assert seen.state is State.FORMING
    assert [f.traceback for f in seen.failures if not f.symptom] == ["Traceback: ..."]
    cluster.settle()
    assert cluster.view.n == 2


def test_when_all_nodes_fail_together_the_agents_outside_read_the_first_report_alone(monkeypatch):
    """A thousand agents that let etcd sort a thousand tracebacks keep it busy for half a minute."""
    cluster = running()
    for name in reversed(NAMES):
        cluster.agents[name].report_failure(1, Failure(node=name, symptom=False, summary=name))
    outside = [agent for agent in cluster.agents.values() if not agent._job_view.whole]
    for agent in cluster.agents.values():
        if agent not in outside:
            agent.poll()
    read = []
    for agent in outside:
        monkeypatch.setattr(agent._store, "range", lambda prefix, **how: read.append(prefix))
        seen = agent.poll()
        assert (seen.state, seen.failed) == (State.FORMING, NAMES[-1])
        assert min(seen.failures, key=lambda failure: failure.revision).node == NAMES[-1]
    assert read == []


def test_an_agent_outside_that_was_taken_for_dead_is_back_in_the_next_round():
    cluster = running()
    victim = cluster.agents["n09"].node
    assert cluster.agents["n08"].evict(victim, ended=True)
    cluster.settle(30)
    assert victim.id in [node.id for node in cluster.view.members.nodes]


def test_an_agent_outside_knows_when_etcd_has_lost_what_it_has_reported():
    cluster = running()
    agent, shared = cluster.agents["n10"], cluster.store._shared
    copy = deepcopy(shared.database)
    agent.report_done(1)
    assert agent.poll().done == {"n10"}
    shared.database = copy
    cluster.clock.advance(2 * REREAD_S)
    assert agent.poll().done == frozenset()
    agent.report_done(1)
    cluster.clock.advance(2 * REREAD_S)
    stored = parse(KEYS, cluster.store.range(KEYS.prefix), agent._spec)
    assert agent.poll().done == stored.done == {"n10"}


def test_an_agent_outside_is_told_to_drain():
    cluster = running()
    agent = cluster.agents["n10"]
    order = '{"node": "n10", "incarnation": "1", "by": "me"}'
    cluster.store.put(KEYS.drain("n10"), order)
    assert agent.poll().drain_order(agent.node).by == "me"


def test_every_agent_tells_its_workers_of_the_newest_checkpoint_and_where_the_job_resumes_from():
    cluster = running()
    agent = cluster.agents["n10"]
    where = {"tag": "t", "digest": "d", "samples": 8, "root": "/shared"}
    assert agent.commit(agent.snapshot.fence, CommitRequest(request=1, step=7, **where))
    agent.report_failure(1, Failure(node="n10", symptom=False, summary="broke"))
    cluster.settle()
    told = [
        round_env(each.poll(), "job", each.node, each.secret, "/s")
        for each in cluster.agents.values()
    ]
    told = {(e["ZERO_ROUND"], e["ZERO_COMMITTED_STEP"], e["ZERO_COMMITTED_ROOT"]) for e in told}
    assert told == {("2", "7", "/shared")}


def test_a_round_costs_each_agent_the_same_however_many_there_are():
    """A constant for the agents outside, and for three agents one for each node."""

    def cost(count: int) -> float:
        cluster = running([f"n{index:03}" for index in range(count)])
        before = dict(cluster.store.told)
        cluster.agents["n005"].report_failure(1, Failure(node="n005", symptom=False, summary="x"))
        for _ in range(5):
            for agent in cluster.agents.values():
                cluster.react(agent)
        assert cluster.view.n == 2
        return (cluster.store.told["changes"] - before["changes"]) / count

    small, large = cost(10), cost(40)
    assert large <= small < 15


def test_a_store_that_lost_the_job_is_noticed_and_named():
    cluster = running()
    cluster.store._shared.database = Database()
    cluster.clock.advance(2 * REREAD_S)
    for name in ("n00", "n11"):
        with pytest.raises(StoreReplaced, match="has lost the data of job job"):
            cluster.agents[name].poll()


def test_no_round_begins_in_a_store_that_loses_the_job_at_that_moment(monkeypatch):
    cluster = Cluster()
    agent = cluster.join("a")

    def restored(*arguments):
        cluster.store._shared.database = Database()
        return begin(*arguments)

    begin = agent._store.txn
    monkeypatch.setattr(agent._store, "txn", restored)
    with pytest.raises(StoreReplaced, match="has lost the data of job job"):
        cluster.settle()
    assert cluster.store._shared.database.items == {}


def test_an_ended_job_of_the_same_name_in_a_later_store_of_the_same_id_ends_no_other():
    cluster, ended = running(NAMES[:2]), running(NAMES[:1])
    ended.agents["n00"].report_done(1)
    for number in range(100):
        ended.store.put("later", str(number))
    ended.settle()
    assert ended.view.state is State.DONE
    cluster.store._shared.database = ended.store._shared.database
    cluster.clock.advance(2 * REREAD_S)
    for agent in cluster.agents.values():
        with pytest.raises(StoreReplaced, match="has another job of this name"):
            agent.poll()


# ---- the copy ----


def test_a_copy_follows_its_keys_without_reading_them_again():
    store = CountingStore(ManualClock())
    store.put("a/1", "x")
    copy = Replica(store.client(), "a/", lambda: None)
    store.put("a/2", "y")
    store.delete("a/1")
    store.put("b/1", "z")
    assert {item.key: item.value for item in copy.look().items} == {"a/2": "y"}
    assert store.told["keys"] == 1
    assert copy.look() is copy.look()


def test_a_copy_reads_again_what_a_compaction_has_taken_away():
    store = MemoryStore(ManualClock())
    copies = itertools.count()
    copy = Replica(store, "a/", lambda: next(copies))
    store.put("a/1", "x")
    copy._lost_track(store.range("").revision)
    assert [item.value for item in copy.look().items] == ["x"]


def test_a_reading_that_is_older_than_the_watch_is_not_believed():
    class SlowReader(MemoryStore):
        late = False

        def range(self, prefix, **how):
            found = super().range(prefix, **how)
            if self.late:
                self.late = False
                self.client().put("a/2", "y")
            return found

    store = SlowReader(ManualClock())
    copy = Replica(store, "a/", lambda: None)
    copy.distrust()
    store.late = True
    assert [item.key for item in copy.look().items] == ["a/2"]


def test_a_reading_that_etcd_has_refused_is_made_again():
    class RefusingReader(MemoryStore):
        refuses = False

        def range(self, prefix, **how):
            if self.refuses:
                raise StoreRefused("permission denied")
            return super().range(prefix, **how)

    store = RefusingReader(ManualClock())
    copy = Replica(store, "a/", lambda: None)
    copy._lost_track(store.range("").revision)
    store.refuses = True
    with pytest.raises(StoreRefused):
        copy.look()
    store.refuses = False
    store.put("a/1", "x")
    assert [item.key for item in copy.look().items] == ["a/1"]


class Histories:
    """A store that is written, restored from copies, and replaced, with a watch that is late."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.cluster, self.database = 1, Database()
        self.copies = [(1, deepcopy(self.database))]
        self.late: deque[Callable[[], None]] = deque()
        self.told: int | None = None

    def range(self, prefix):
        found = Range(self.database.revision, tuple(self.database.under(prefix)), self.cluster)
        if self.told is not None and self.random.random() < 0.3:  # while the answer is on its way
            self.write()
            self.deliver()
        return found

    def watch(self, prefix, on_changes, *, after, cluster, on_compacted):
        self.on_changes, self.on_compacted, self.told = on_changes, on_compacted, after

    def write(self):
        key = f"a/{self.random.randrange(4)}"
        if batch := self.database.write([self.random.choice([Delete(key), Put(key, "x")])]):
            self.late.append(lambda: self.tell(batch))

    def tell(self, batch):
        self.told = batch[0].revision
        self.on_changes(batch)

    def deliver(self):
        while self.late:
            self.late.popleft()()

    def copy(self):
        self.copies.append((self.cluster, deepcopy(self.database)))

    def restore(self) -> bool:
        """Go on from a copy, perhaps as another cluster; whether that is a jump."""
        was, self.late = Position(self.cluster, self.database.revision), deque()
        self.cluster, copy = self.random.choice(self.copies)
        self.database = deepcopy(copy)
        if self.random.random() < 0.5:
            self.cluster = self.random.randrange(1 << 60)
        now = Position(self.cluster, self.database.revision)
        self.copies = [(c, d) for c, d in self.copies if c != now.cluster or d.revision <= now[1]]
        if now.cluster != was.cluster or now.revision < self.told:
            self.told = now.revision
            self.late.append(lambda: self.on_compacted(now.revision))
        for batch in self.database.since(self.told):
            self.late.append(lambda batch=batch: self.tell(batch))
        return not now.follows(was)


@pytest.mark.parametrize("seed", range(20))
def test_a_copy_follows_a_store_through_all_that_happens_to_it_and_notices_what_it_was(seed):
    store = Histories(seed)
    copy = Replica(store, "a/", lambda: None)

    def settle() -> None:
        for _ in range(3):
            store.deliver()
            copy.distrust()
            copy.look()

    for _ in range(60):
        store.random.choice([store.write, store.copy, store.deliver, copy.look, store.restore])()
        if store.random.random() < 0.2:
            settle()
            store.deliver()
            assert {i.key: i for i in copy.look().items} == store.database.items
            copy.jump()
            jumps = store.restore()
            copy.distrust()
            copy.look()
            settle()
            assert (copy.jump() is not None, copy.jump()) == (jumps, None)


# ---- the membership ----


@pytest.mark.parametrize("count", [1, 500])
def test_a_membership_is_read_as_it_was_written_and_takes_a_few_bytes_for_each_node(count):
    nodes = [
        Node(id=f"node-{i:04}", incarnation=f"{i:08x}", address=f"10.0.{i % 250}.{i}", slots=8)
        for i in range(count)
    ]
    members = Members(tuple(nodes), restarts=2)
    store = MemoryStore(ManualClock())
    store.put(KEYS.round, '{"n": 3, "state": "ACTIVE", "cause": ""}')
    store.put(KEYS.of_round(3, "members"), members.to_json())
    spec = JobSpec(min_nodes=1, max_nodes=1000)
    assert parse(KEYS, store.range(KEYS.prefix), spec).members == members
    assert len(members.to_json()) < 300 + 40 * count
