"""Who is removed on a suspicion: the dead, soon; never one whose lease was refreshed since."""

from __future__ import annotations

import math
import os
import signal
import subprocess

import pytest

from tests.support.waiting import wait_for
from tests.unit.orchestrator.test_rendezvous import Cluster
from zero_agent.loop.suspects import LeaseVerdict, Suspects, Suspicion
from zero_agent.node import identity
from zero_contract.journal import Journal

POLL_S = 0.1
TTLS = [3, 10, 30]


class Lease:
    """One that is refreshed every third of its time to live, up to a death; told as etcd does."""

    def __init__(self, ttl_s: float, first_s: float, dies_s: float, late_s: float = 0.0) -> None:
        self.ttl_s, self._first_s, self._dies_s, self._late_s = ttl_s, first_s, dies_s, late_s

    def left_s(self, now_s: float) -> float:
        period_s = self.ttl_s / 3 + self._late_s
        count = math.floor((min(now_s, self._dies_s) - self._first_s) / period_s)
        return max(0, math.floor(self._first_s + count * period_s + self.ttl_s - now_s))


def judged(lease: Lease, since_s: float, poll_s: float = POLL_S) -> tuple[LeaseVerdict, float]:
    """The verdict, and how long after the suspicion; UNKNOWN if the lease ends first."""
    suspicion, now_s = Suspicion(lease.ttl_s, since_s), since_s
    while lease.left_s(now_s) > 0 or now_s == since_s:
        found = suspicion.judge(lease.left_s(now_s), now_s, now_s + 0.002)
        if found is not LeaseVerdict.UNKNOWN:
            return found, now_s - since_s
        now_s += poll_s
    return LeaseVerdict.UNKNOWN, now_s - since_s


@pytest.mark.parametrize("ttl_s", TTLS)
def test_a_dead_agent_is_removed_well_before_its_lease_ends(ttl_s):
    took = []
    for age in range(100):  # how long before its death it last refreshed its lease
        dies_s = 1000.0
        lease = Lease(ttl_s, first_s=dies_s - age / 100 * ttl_s / 3, dies_s=dies_s)
        found, after_s = judged(lease, since_s=dies_s + 0.01)
        assert found is not LeaseVerdict.ALIVE
        took.append(after_s)
        assert after_s <= ttl_s
    assert sum(took) / len(took) <= 0.45 * ttl_s


@pytest.mark.parametrize("late_s", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("poll_s", [0.1, 0.7, 2.0])
@pytest.mark.parametrize("ttl_s", TTLS)
def test_a_living_agent_is_never_removed_however_seldom_one_looks(ttl_s, poll_s, late_s):
    for phase in range(100):
        lease = Lease(ttl_s, first_s=phase / 100 * ttl_s / 3, dies_s=1e9, late_s=late_s)
        found, after_s = judged(lease, since_s=1000.0, poll_s=poll_s)
        assert found is LeaseVerdict.ALIVE
        assert after_s <= ttl_s + poll_s


class Suspecting(Cluster):
    """Agents of one job, of which `a` has a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.suspects = Suspects(Journal("a"), self.clock)
        for name in "ab":
            self.join(name)
        self.settle()
        self.suspected = self.agents["b"].node
        store = self.agents["a"]._store
        exactly = store.time_left
        store.time_left = lambda lease: math.floor(exactly(lease))  # as etcd tells it

    def look(self, seconds: float) -> None:
        for _ in range(int(seconds / POLL_S)):
            self.clock.advance(POLL_S)
            self.suspects.run(self.agents["a"])
            for agent in self.agents.values():
                self.react(agent)


def test_an_agent_that_keeps_its_lease_alive_stays_although_its_port_refuses():
    job = Suspecting()
    for _ in range(3):
        job.suspects.add(job.suspected, False)
        job.look(10.0)
    assert (job.view.n, job.view.charges, len(job.view.nodes)) == (1, 0, 2)


def test_an_agent_whose_lease_is_not_kept_alive_is_removed_before_the_lease_ends():
    job = Suspecting()
    job.clock.advance(0.5)
    job.kill("b")
    job.suspects.add(job.suspected, False)
    job.look(1.8)
    assert [node.id for node in job.agents["a"].snapshot.nodes] == ["a"]
    assert job.agents["a"].snapshot.charges == 1


def test_who_is_certainly_gone_is_removed_at_once():
    job = Suspecting()
    job.kill("b")
    job.suspects.add(job.suspected, True)
    job.look(POLL_S)
    assert [node.id for node in job.agents["a"].snapshot.nodes] == ["a"]


def test_who_has_left_by_itself_before_anybody_looks_is_suspected_no_more():
    job = Suspecting()
    job.suspects.add(job.suspected, False)
    job.agents.pop("b").close()
    job.look(POLL_S)
    assert job.suspects._suspects == {}
    job.suspects.add(job.suspected, True)
    job.look(POLL_S)
    assert job.suspects._dead == []
    assert job.agents["a"].snapshot.charges == 1, "once, as the loss of a node"


def test_a_process_that_was_removed_and_lives_is_never_removed_on_a_suspicion_again():
    job = Suspecting()
    assert job.agents["a"].evict(job.suspected, ended=True)
    job.look(10.0)
    back = job.agents["a"].snapshot.node("b")
    assert (back.incarnation, back.evicted) == (job.suspected.incarnation, 1)
    job.agents["b"]._registration._keeper._repeating.cancel()
    job.suspects.add(back, False)
    job.look(2.0)
    assert job.agents["a"].snapshot.node("b") == back, "only its lease decides"


def test_the_end_of_a_process_is_seen_on_its_own_machine_and_nowhere_else():
    with subprocess.Popen(["sleep", "60"]) as process:
        machine, _, _ = identity.own().partition("/")
        name = f"{machine}/{process.pid}/{identity._start(process.pid)}"
        assert identity.is_gone(name) is False
        os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: identity.is_gone(name), 30, "the end, before anybody has waited for it")
    assert identity.is_gone(name) is True
    assert identity.is_gone(identity.own()) is False
    assert identity.is_gone(f"{machine}/{os.getpid()}/1") is True, "the number is another's now"
    assert identity.is_gone(f"elsewhere/{os.getpid()}/1") is None
    assert identity.is_gone("") is None
