"""Several agents and one store, moved on by a manual clock: no process, no waiting."""

import contextlib
import dataclasses
import json
from unittest.mock import Mock

import pytest

from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from zero_contract.journal import Journal
from zero_contract.worker import CommitRequest
from zero_orchestrator.errors import SpecError, StoreUnavailable, TakenForGone
from zero_orchestrator.membership.dead_links import DeadLink, LinkReport
from zero_orchestrator.membership.job_state import Failure, Node, State
from zero_orchestrator.membership.rendezvous import NodeTaken, Rendezvous
from zero_orchestrator.membership.rounds import Timing
from zero_orchestrator.membership.runs import command_name, current_run
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.observe.events import read


class Cluster:
    """Agents of one job; `settle` lets time pass until nothing changes any more."""

    job = "job"

    def __init__(self, **spec: int) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        self.spec = JobSpec(**{"min_nodes": 1, "max_nodes": 4, "max_restarts": 3, **spec})
        self.agents: dict[str, Rendezvous] = {}
        self.timing = Timing()
        self.quiet_s = 0.0
        """How long workers take to leave."""
        self.leaving: dict[tuple[str, int], float] = {}

    def join(self, name: str, incarnation: str = "1", spec: JobSpec | None = None) -> Rendezvous:
        agent = self.agent(name, incarnation, spec)
        agent.register()
        self.agents[name] = agent
        return agent

    def agent(self, name: str, incarnation: str, spec: JobSpec | None = None) -> Rendezvous:
        """One that has not registered."""
        return Rendezvous(
            self.store.client(),
            self.job,
            spec or self.spec,
            Node(id=name, incarnation=incarnation, address=name, slots=1),
            clock=self.clock,
            journal=Journal(name),
            timing=self.timing,
        )

    def kill(self, name: str) -> None:
        """The process is gone: its lease is not kept alive any more."""
        lease = self.agents.pop(name)._registration._keeper
        lease._repeating.cancel()

    def settle(self, seconds: float = 10.0) -> None:
        for _ in range(int(seconds / 0.1)):
            self.clock.advance(0.1)
            for agent in list(self.agents.values()):
                self.react(agent)

    def react(self, agent: Rendezvous) -> None:
        """Poll, and do an agent's part of leaving a round."""
        try:
            job = agent.poll()
        except TakenForGone:
            return  # as the agent's loop: the next poll takes a new lease
        leaving = job.state is State.FORMING or job.yielding is not None
        if leaving and job.has_member(agent.node) and agent.node.id not in job.quiet:
            since = self.leaving.setdefault((agent.node.id, job.n), self.clock.now())
            if self.clock.now() >= since + self.quiet_s:
                agent.report_quiet(job.n)

    @property
    def view(self):
        views = [agent.snapshot for agent in self.agents.values()]
        assert all(
            (v.n, v.state, v.members) == (views[0].n, views[0].state, views[0].members)
            for v in views
        ), "every agent sees the same round"
        return views[0]

    def order(self) -> str:
        return "".join(node.id for node in self.view.members.nodes)


def test_four_agents_form_one_round():
    cluster = Cluster()
    for name in "abcd":
        cluster.join(name)
    cluster.settle()
    assert (cluster.view.state, cluster.view.n, cluster.order()) == (State.ACTIVE, 1, "abcd")


def test_the_job_goes_on_without_a_lost_node_for_one_restart():
    cluster = Cluster()
    for name in "abcd":
        cluster.join(name)
    cluster.settle()
    cluster.kill("a")
    cluster.settle()
    assert (cluster.view.n, cluster.order(), cluster.view.charges) == (2, "bcd", 1)


def test_who_joins_soon_after_an_outage_takes_nobody_for_lost_whose_lease_has_lapsed_in_it():
    cluster = Cluster()
    cluster.join("a")
    cluster.settle()
    cluster.kill("a")
    cluster.clock.advance(4.0)
    late = cluster.join("b")
    job = late.poll()
    assert (job.state, job.charges) == (State.ACTIVE, 0)
    assert late.reason == "etcd may have been silent; waiting for node a to register again"
    cluster.clock.advance(8.0)
    assert late.poll().charges == 1


@pytest.mark.parametrize("ended", [True, False])
def test_who_has_just_joined_waits_for_a_node_unless_its_process_has_ended(ended):
    cluster = Cluster()
    a = cluster.join("a")
    cluster.settle()
    late = cluster.join("b")
    assert late.evict(a.node, ended=ended)
    assert late.poll().charges == (1 if ended else 0)


def test_who_takes_the_place_of_a_lost_node_waits_for_nobody():
    cluster = Cluster()
    cluster.join("a")
    cluster.settle()
    cluster.kill("a")
    cluster.clock.advance(4.0)
    assert cluster.join("a", "2").poll().charges == 1


def test_the_address_of_a_round_that_etcd_has_forgotten_is_not_that_of_another_one():
    """The restored etcd may give its number again before the first node has seen the restore."""
    cluster = Cluster()
    a = cluster.join("a")
    cluster.settle()
    job = a.poll()
    a.publish_master(dataclasses.replace(job, fence=job.fence - 1), "a:1")
    assert a.poll().master is None
    a.publish_master(job, "a:2")
    assert a.poll().master == "a:2"


def test_reports_of_a_round_that_was_lost_with_the_data_of_etcd_do_not_count():
    """Agents that have not yet seen that etcd was restored from a copy write them once more."""
    cluster = Cluster()
    a = cluster.join("a")
    failure = Failure(node="a", symptom=False, summary="of the lost round")
    cluster.store.put(a.keys.report(1, "fail", "a"), failure.to_json())
    cluster.store.put(a.keys.report(1, "done", "a"), "")
    cluster.settle()
    assert (cluster.view.n, cluster.view.state, cluster.view.charges) == (1, State.ACTIVE, 0)


def test_a_late_node_joins_and_costs_nothing():
    cluster = Cluster()
    cluster.join("a")
    cluster.settle()
    cluster.join("b")
    cluster.settle()
    assert (cluster.view.n, cluster.order(), cluster.view.charges) == (2, "ab", 0)


@pytest.mark.parametrize(("every_s", "rounds"), [(0.0, 15), (None, 8)])
def test_nodes_that_come_one_after_the_other_do_not_end_a_round_each(every_s, rounds):
    """Every 10 s one comes, and it takes 5 s to leave a round."""
    cluster = Cluster(max_nodes=20)
    cluster.quiet_s, cluster.timing = 5.0, Timing(grow_every_s=every_s)
    cluster.join("n00")
    for number in range(1, 15):
        cluster.settle(10.0)
        cluster.join(f"n{number:02}")
    cluster.settle(120.0)
    assert len(cluster.view.members.nodes) == 15
    assert cluster.view.took_s >= 5.0
    assert cluster.view.n == rounds


def test_a_drained_node_leaves_and_costs_nothing():
    cluster = Cluster()
    for name in "abc":
        cluster.join(name)
    cluster.settle()
    cluster.agents["a"].drain()
    cluster.settle()
    cluster.agents.pop("a").close()
    assert (cluster.order(), cluster.view.charges) == ("bc", 0)


def test_a_node_that_is_told_to_leave_before_it_has_joined_takes_part_in_no_round():
    cluster = Cluster()
    cluster.join("a")
    cluster.settle()
    late = cluster.agent("b", "1")
    late.drain()
    late.register()
    cluster.settle()
    assert [(node.id, node.draining) for node in cluster.view.nodes] == [("a", False), ("b", True)]
    assert cluster.order() == "a"


def test_the_death_of_any_agent_does_not_stop_the_others_from_deciding():
    """Without a leader: whoever is first in turn may be the one that died."""
    for victim in "abcd":
        cluster = Cluster()
        for name in "abcd":
            cluster.join(name)
        cluster.settle()
        cluster.kill(victim)
        cluster.settle()
        assert cluster.order() == "abcd".replace(victim, "")


def test_a_transition_that_another_agent_has_made_is_not_made_again():
    cluster = Cluster()
    late, other = cluster.join("a"), cluster.join("b")
    cluster.settle()
    n = cluster.view.n
    other.report_failure(n, Failure(node="b", symptom=False, summary="broke"))
    late._look()
    other.poll()  # the failure ends the round
    head = cluster.store.get(late.keys.round)
    assert (late.snapshot.state, late.snapshot.fence < head.mod_revision) == (State.ACTIVE, True)
    late._advance()
    cluster.clock.advance(10.0)
    assert late._advance(), "the late one finds it due, and tries"
    assert cluster.store.get(late.keys.round) == head


def test_a_commit_is_published_by_the_current_round_only():
    cluster = Cluster()
    agent = cluster.join("a")
    cluster.settle()
    fence = agent.snapshot.fence
    assert agent.commit(fence, CommitRequest(request=1, step=1, tag="t", digest="d", samples=8))
    agent.report_failure(1, Failure(node="a", symptom=False, summary="broke"))
    cluster.settle()
    assert agent.snapshot.n == 2
    assert not agent.commit(
        fence, CommitRequest(request=1, step=2, tag="t", digest="d", samples=16)
    )
    assert agent.commit(
        agent.snapshot.fence, CommitRequest(request=1, step=2, tag="t", digest="d", samples=16)
    )


def fail(cluster: Cluster, name: str, step: int | None = None) -> None:
    """The workers of a node fail in the round that runs."""
    n = cluster.view.n
    failure = Failure(node=name, symptom=False, summary=f"{name} broke", step=step)
    cluster.agents[name].report_failure(n, failure)
    cluster.settle(5.0)


def test_a_node_that_keeps_failing_is_replaced_by_a_spare_and_comes_back_by_the_stores_clock():
    cluster = Cluster(max_nodes=2, max_restarts=9, exclude_after=2, exclude_for_s=30)
    for name in "abc":
        cluster.join(name)
        cluster.settle(0.5)
    cluster.settle()
    fail(cluster, "b")
    assert cluster.order() == "ab"
    fail(cluster, "b")
    assert (cluster.order(), cluster.view.charges) == ("ac", 2)
    assert [e.host for e in cluster.view.exclusions] == ["b"]
    cluster.agents.pop("c").close()
    cluster.settle(5.0)
    assert cluster.order() == "a", "nobody else may join while b is excluded"
    cluster.settle(40.0)
    assert (cluster.order(), cluster.view.exclusions) == ("ab", ())
    fail(cluster, "b")
    assert cluster.order() == "a", "the next failure in a row excludes it again"
    cluster.settle(40.0)
    assert cluster.order() == "a", "for longer than the first time"


def test_an_excluded_node_comes_back_early_when_the_minimum_needs_it():
    cluster = Cluster(min_nodes=2, max_nodes=3, max_restarts=9, exclude_after=1, exclude_for_s=900)
    for name in "abc":
        cluster.join(name)
    cluster.settle()
    fail(cluster, "b")
    assert cluster.order() == "ac"
    cluster.kill("c")
    cluster.settle()
    assert cluster.order() == "ab"
    cluster.join("c", incarnation="2")
    cluster.settle()
    assert cluster.order() == "ac", "and leaves when it can be done without"


def test_a_crash_loop_ends_the_job_before_its_budget_is_spent():
    cluster = Cluster(max_restarts=100, max_restarts_without_progress=3)
    cluster.join("a")
    cluster.settle()
    for step in (5, 5, 5):
        fail(cluster, "a", step)
    assert cluster.view.state is State.ACTIVE
    fail(cluster, "a", 5)
    assert (cluster.view.state, cluster.view.by, cluster.view.charges) == (
        State.FAILED,
        "give up",
        4,
    )


def test_a_checkpoint_in_memory_is_fenced_too_and_wakes_no_agent():
    cluster = Cluster()
    agent = cluster.join("a")
    cluster.settle()
    fence, facts = (
        agent.snapshot.fence,
        {"tag": "t", "digest": "d", "samples": 8, "in_memory": True},
    )
    assert agent.commit(fence, CommitRequest(request=1, step=1, **facts))
    kept = cluster.store.get(agent.keys.in_memory)
    assert kept is not None
    assert json.loads(kept.value)["step"] == 1
    assert not kept.key.startswith(agent.keys.prefix)
    assert cluster.store.get(agent.keys.latest) is None
    agent.report_failure(1, Failure(node="a", symptom=False, summary="broke"))
    cluster.settle()
    assert not agent.commit(fence, CommitRequest(request=1, step=2, **facts))


def test_a_committed_step_gives_a_restart_back():
    cluster = Cluster(max_restarts=1, refill_after_steps=10)
    agent = cluster.join("a")
    cluster.settle()
    for step in (4, 14):
        facts = {"tag": "t", "digest": "d", "samples": step}
        assert agent.commit(agent.snapshot.fence, CommitRequest(request=1, step=step, **facts))
        fail(cluster, "a")
        assert (cluster.view.state, cluster.view.spent) == (State.ACTIVE, 1)
    fail(cluster, "a")
    assert (cluster.view.state, cluster.view.charges) == (State.FAILED, 3)


def test_an_agent_with_another_specification_is_refused():
    cluster = Cluster()
    cluster.join("a")
    with pytest.raises(SpecError, match="max_nodes is 4 there and 3 here"):
        cluster.join("b", spec=JobSpec(min_nodes=1, max_nodes=3, max_restarts=3))


def test_a_second_agent_under_the_same_name_replaces_the_first_which_says_so():
    cluster = Cluster()
    first = cluster.join("a")
    cluster.settle()
    cluster.join("a", incarnation="2")
    with pytest.raises(NodeTaken, match="own --node-id"):
        first.poll()


def test_an_agent_whose_lease_lapsed_while_nobody_looked_goes_on_without_a_restart():
    cluster = Cluster()
    agent = cluster.join("a")
    cluster.settle()
    cluster.store.revoke(agent.lease)
    cluster.settle()
    assert (agent.snapshot.n, agent.snapshot.charges) == (1, 0)
    assert [node.id for node in agent.snapshot.nodes] == ["a"]


def test_what_a_node_could_not_say_of_itself_is_not_taken_for_said(monkeypatch):
    """Else the next round begins with a node that knows itself to be unhealthy."""
    cluster = Cluster()
    agent = cluster.join("a")
    cluster.settle()

    def away(*_: object, **__: object) -> int:
        raise StoreUnavailable("no answer")

    with monkeypatch.context() as outage:
        outage.setattr(agent._store, "put", away)
        with pytest.raises(StoreUnavailable):
            agent.describe(unhealthy="no GPU")
    assert agent.node.unhealthy == "", "the agent compares, and says it again"
    agent.describe(unhealthy="no GPU")
    cluster.settle()
    assert [node.unhealthy for node in cluster.view.nodes] == ["no GPU"]


def test_an_agent_that_has_a_new_lease_after_a_silence_notices_lost_nodes_again():
    """Its old lease is found dead while registering, so nobody says that the silence is over."""
    cluster = Cluster()
    agent = cluster.join("a")
    cluster.join("b")
    cluster.settle()
    agent._durations.silent("no answer")
    agent._registration._keeper._repeating.cancel()
    cluster.store.revoke(agent.lease)
    with pytest.raises(StoreUnavailable, match="its lease had run out"):
        agent.poll()
    cluster.settle()
    cluster.kill("b")
    cluster.settle(20)
    assert (agent.snapshot.n, cluster.order()) == (2, "a")


def test_the_same_command_again_is_a_new_run_only_after_the_old_one_has_ended():
    store = MemoryStore(ManualClock())
    assert current_run(store, "train") == "train.1"
    assert current_run(store, "train") == "train.1"
    round_key = "/zero/v1/train.1/round"
    lease = store.grant(3)
    store.put("/zero/v1/train.1/nodes/a", "{}", lease=lease)
    store.put(round_key, '{"n": 1, "state": "ACTIVE", "cause": ""}')
    assert current_run(store, "train") == "train.1"
    store.put(round_key, '{"n": 1, "state": "DONE", "cause": ""}')
    assert current_run(store, "train") == "train.2"


def test_a_run_that_all_its_agents_have_left_is_over():
    store = MemoryStore(ManualClock())
    assert current_run(store, "train") == "train.1"
    store.put("/zero/v1/train.1/round", '{"n": 1, "state": "ACTIVE", "cause": ""}')
    assert current_run(store, "train") == "train.2"


def test_an_agent_that_stood_still_while_its_command_was_started_again_stops_for_good():
    cluster = Cluster()
    cluster.job = current_run(cluster.store, "train")
    agent = cluster.join("a")
    cluster.settle()
    fence = agent.snapshot.fence
    cluster.store.revoke(agent.lease)
    assert current_run(cluster.store, "train") == "train.2"
    assert not agent.commit(fence, CommitRequest(request=1, step=1, tag="t", digest="d", samples=8))
    cluster.settle()
    assert agent.snapshot.state is State.STOPPED
    assert "started again as train.2" in agent.snapshot.cause


def test_a_machine_that_is_taken_away_after_it_was_told_to_leave_costs_no_restart():
    cluster = Cluster()
    for name in "abc":
        cluster.join(name)
    cluster.settle()
    cluster.agents["c"].drain()
    cluster.kill("c")
    cluster.settle()
    assert (cluster.order(), cluster.view.n, cluster.view.charges) == ("ab", 2, 0)
    cluster.kill("b")
    cluster.settle()
    assert (cluster.order(), cluster.view.charges) == ("a", 1), "this one was not told"


def test_an_agent_in_the_place_of_one_that_has_left_costs_a_restart_when_it_is_lost():
    """A unit of systemd, or a pod, starts the agent again under the same id."""
    cluster = Cluster()
    for name in "ab":
        cluster.join(name)
    cluster.settle()
    cluster.agents["b"].drain()
    cluster.agents.pop("b").close()
    cluster.join("b", "2")
    cluster.settle()
    assert (cluster.order(), cluster.view.n, cluster.view.charges) == ("ab", 2, 0)
    cluster.kill("b")
    cluster.settle()
    assert (cluster.order(), cluster.view.charges) == ("a", 1)


def test_who_leaves_while_others_begin_a_round_with_it_costs_no_restart(monkeypatch):
    """They had decided before they saw the wish, and it goes before their transaction arrives."""
    cluster = Cluster()
    cluster.join("a")
    cluster.settle()
    b = cluster.join("b")
    a = cluster.agents["a"]
    for agent in (a, b):
        agent.poll()
    cluster.clock.advance(5.0)
    cluster.react(a)  # asks its workers to make room
    cluster.react(a)
    assert b.poll().n == 1
    write = a._store.txn

    def late(compares, writes):
        if any("/rounds/2/members" in write.key for write in writes):
            b.drain()
            b.close()
        return write(compares, writes)

    monkeypatch.setattr(a._store, "txn", late)
    del cluster.agents["b"]
    cluster.settle()
    assert (cluster.order(), cluster.view.charges) == ("a", 0)
    assert cluster.view.n == 3


@pytest.mark.parametrize("move", ["open", "activate", "yield", "form"])
def test_a_transition_whose_answer_is_lost_is_told_by_its_own_revision(monkeypatch, move):
    """Its writer may die before it hears of it, and the job may move on any number of times."""
    cluster = Cluster()
    a = cluster.join("a")
    write, lost = a._store.txn, []

    def loses_its_answer(compares, writes):
        done = write(compares, writes)
        value = " ".join(write.key + getattr(write, "value", "") for write in writes)
        if done.succeeded and (f'"by": "{move}"' in value or f"/{move}" in value) and not lost:
            lost.append(done.revision)
            raise StoreUnavailable("no answer")
        return done

    monkeypatch.setattr(a._store, "txn", loses_its_answer)
    for act in (cluster.settle, a.drain, cluster.settle, cluster.settle):
        with contextlib.suppress(StoreUnavailable):
            act()
    told = [event for event in read(cluster.store, cluster.job) if event.record["event"] == move]
    assert [event.revision for event in told][:1] == lost


@pytest.mark.parametrize(
    ("program", "command", "is_module", "name"),
    [
        ("a/train.py", ["/x/a/train.py", "run.py"], False, "train"),
        ("pkg.train", ["pkg.train", "--epochs=2"], True, "pkg.train"),
        ("zero_deepspeed.as_deepspeed", ["m", "hf/run_clm.py", "--bf16"], True, "run_clm"),
    ],
)
def test_a_job_has_the_name_of_its_script(program, command, is_module, name):
    assert command_name(program, command, is_module=is_module).rpartition("-")[0] == name


def test_an_agent_that_got_no_new_lease_at_first_registers_at_its_next_poll(monkeypatch):
    cluster = Cluster()
    a = cluster.join("a")
    cluster.settle()
    cluster.store.revoke(a.lease)
    cluster.clock.advance(2.0)  # its keeper hears that the lease has ended
    with monkeypatch.context() as silent:
        silent.setattr(a._store, "grant", Mock(side_effect=StoreUnavailable("no answer")))
        with pytest.raises(StoreUnavailable):
            a.poll()
    job = a.poll()
    assert job.node("a").evicted == 0, "nobody has evicted it"
    assert (job.state, job.n) == (State.ACTIVE, 1)


def test_half_of_a_large_job_is_set_aside_although_etcd_takes_128_writes_at_once():
    cluster = Cluster(max_nodes=300)
    names = [f"n{index:03}" for index in range(300)]
    for name in names[1:]:
        other = Node(id=name, incarnation="1", address=name, slots=1)
        cluster.store.put(f"/zero/v1/job/nodes/{name}", other.to_json())
    agent = cluster.join(names[0])
    cluster.settle()
    for index, name in enumerate(names):  # of the nodes after it, it reaches every second one
        dead = tuple(DeadLink(to=other) for other in names[index + 1 : index + 65 : 2])
        report = LinkReport(node=name, dead=dead)
        cluster.store.put(f"/zero/v1/job/reports/1/links/{name}", report.to_json())
    job = agent.poll()
    assert (job.state, job.charges) == (State.FORMING, 1)
    assert len(job.aside) > 128
    assert not any(link <= {node.id for node in job.eligible} for link in job.dead_links)
