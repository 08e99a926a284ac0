"""etcd goes away while a job runs: the workers go on, and no restart is charged."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time

import pytest

from tests.processes.test_elastic import assert_as_if_nothing_had_happened
from tests.support.cluster import TOGETHER, Cluster, final_hash, is_alive
from tests.support.etcd_server import server
from tests.support.suspended import suspend
from tests.support.waiting import wait_for
from zero_contract.exit_codes import AgentExit
from zero_orchestrator.ctl.page import picture as pictures
from zero_orchestrator.store.etcd.client import EtcdStore

pytestmark = [pytest.mark.processes, pytest.mark.etcd]

AT_ONCE_S = 4
"""Sooner than one call to an etcd that stands still may take, also on a slow machine."""


@pytest.fixture
def own(tmp_path, tmp_path_factory):
    """A job with an etcd of its own."""
    with server(tmp_path_factory.mktemp("etcd")) as etcd:
        job = Cluster(tmp_path, etcd.endpoint, flags=("--nnodes=1:2", "--max-restarts=0"))
        yield job, etcd
        job.close()


def steps_done(job: Cluster) -> int:
    return max((step for step, _ in job.last_steps().values()), default=0)


@pytest.mark.parametrize(
    ("outage", "pause_s", "steps"),
    [
        ("killed and restarted", 0.3, 20),
        ("stopped and continued", 0.3, 20),
        pytest.param(
            "killed and restarted",
            2.0,
            30,
            marks=pytest.mark.timeout(300),
            id="for a minute",
        ),
    ],
)
@pytest.mark.full
def test_an_outage_of_etcd_costs_no_restart_and_no_step(
    own, outage, pause_s, steps, undisturbed_hash
):
    """It lasts for so many steps, each of which takes longer than its pause."""
    job, etcd = own
    job.flags = (*job.flags, TOGETHER)
    job.pace(pause_s)
    job.start("a", "b")
    job.wait_for_step(15, world=2)
    etcd.kill() if outage.startswith("killed") else etcd.suspend()
    before = steps_done(job)
    wait_for(lambda: steps_done(job) > before + steps, 120, "steps without etcd")
    wait_for(lambda: "etcd cannot be reached" in job.output, 150, "a word about it")
    etcd.start() if outage.startswith("killed") else etcd.resume()
    assert_as_if_nothing_had_happened(job, undisturbed_hash)
    assert job.report().repeated_steps == 0
    assert len(job.events("activate")) == 1, "one round from the beginning to the end"
    with contextlib.closing(EtcdStore(etcd.endpoint)) as store:
        seen = pictures.picture(pictures.read(store, job.job), now_s=time.time())
    away = [one for one in seen["problems"] if one["kind"] == "etcd away"]
    assert [one["nodes"] for one in away] == [["a", "b"]], seen["problems"]
    assert away[0]["to_s"] - away[0]["from_s"] > min(pause_s * steps, 10.0) / 2


@pytest.mark.full
def test_a_node_that_is_told_to_leave_during_an_outage_does_so_for_free_when_it_is_over(
    own, undisturbed_hash
):
    job, etcd = own
    job.start("a", "b")
    job.wait_for_step(15, world=2)
    etcd.kill()
    job.agents["a"].process.send_signal(signal.SIGTERM)
    wait_for(lambda: "SIGTERM: leaving when etcd answers" in job.output, 150, "a word about it")
    etcd.start()
    assert job.agents.pop("a").wait() == 128 + signal.SIGTERM
    assert_as_if_nothing_had_happened(job, undisturbed_hash)
    assert (job.report().repeated_steps, job.events("interrupt")) == (0, [])


def asked_to_leave(job, node: str) -> None:
    """SIGTERM a node's agent; its workers, and all others, are in the step that is their last."""
    worker = job.worker_of("a")
    suspend(worker)
    job.agents[node].process.send_signal(signal.SIGTERM)
    wait_for(lambda: len(job.events("leave")) == len(job.agents), 150, "all are told")


@pytest.mark.parametrize(("node", "outage"), [("a", "suspend"), ("b", "kill")])
@pytest.mark.full
def test_a_last_save_that_etcd_does_not_take_is_published_when_it_answers(
    own, node, outage, undisturbed_hash
):
    job, etcd = own
    job.flags = (*job.flags, "--shutdown-timeout=120")
    job.start("a", "b")
    job.wait_for_step(25, world=2)
    asked_to_leave(job, node)
    etcd.suspend() if outage == "suspend" else etcd.kill()
    os.kill(job.worker_of("a"), signal.SIGCONT)
    wait_for(lambda: "is published when etcd answers, within" in job.output, 150, "a word about it")
    etcd.resume() if outage == "suspend" else etcd.start()
    assert job.agents.pop(node).wait() == 128 + signal.SIGTERM
    assert_as_if_nothing_had_happened(job, undisturbed_hash)
    assert (job.report().repeated_steps, job.events("interrupt")) == (0, [])


@pytest.mark.full
def test_a_last_save_that_etcd_never_takes_says_which_steps_are_lost(own):
    job, etcd = own
    job.flags = (*job.flags, "--shutdown-timeout=4")
    job.start("a")
    job.wait_for_step(25, world=1)
    worker = job.worker_of("a")
    asked_to_leave(job, "a")
    etcd.kill()
    os.kill(worker, signal.SIGCONT)
    assert job.agents["a"].wait() == 128 + signal.SIGTERM
    told = re.search(r" is of step (\d+), steps (\d+) to (\d+) are lost", job.output)
    assert told is not None
    kept, first, last = map(int, told.groups())
    assert (first, last) == (kept + 1, job.last_steps()[1, 0][0])


@pytest.mark.full
def test_what_happens_on_a_node_is_acted_on_at_once_while_etcd_stands_still(own):
    job, etcd = own
    job.start("a", "b")
    job.wait_for_step(15, world=2)
    with etcd.suspended():
        wait_for(lambda: "etcd cannot be reached" in job.output, 150, "a word about it")
        os.kill(job.worker_of("b"), signal.SIGKILL)
        wait_for(lambda: job.events("exit"), AT_ONCE_S, "the worker's end")
        agent, worker = job.agents["a"].process, job.worker_of("a")
        agent.send_signal(signal.SIGTERM)
        wait_for(lambda: "SIGTERM: leaving when" in job.output, AT_ONCE_S, "a word about it")
        agent.send_signal(signal.SIGTERM)
        wait_for(lambda: not is_alive(worker), AT_ONCE_S, "the worker's end")
        assert agent.wait(150) == 128 + signal.SIGTERM


@pytest.mark.full
@pytest.mark.parametrize("since", ["the round has begun", "a round before"])
def test_an_etcd_that_is_restored_from_a_copy_is_noticed_by_all_and_ends_no_job_for_good(
    own, since, undisturbed_hash, tmp_path
):
    job, etcd = own
    job.flags = (*job.flags[:-1], "--max-restarts=1", TOGETHER)
    job.start("a", "b")
    job.wait_for_step(15, world=2)
    etcd.stop()
    shutil.copytree(etcd.member.data, tmp_path / "copy")
    etcd.start()
    if since == "a round before":
        os.kill(job.worker_of("b"), signal.SIGKILL)
        wait_for(lambda: len(job.events("activate")) == 2, 150, "the next round")
    job.wait_for_step(steps_done(job) + 3, world=2)
    etcd.kill()
    shutil.rmtree(etcd.member.data)
    shutil.copytree(tmp_path / "copy", etcd.member.data)
    etcd.start()
    if since == "the round has begun":
        wait_for(lambda: job.output.count("etcd has gone back in time") == 2, 150, "two words")
        assert_as_if_nothing_had_happened(job, undisturbed_hash)
        assert len(job.events("activate")) == 1
        return
    assert {job.agents.pop(node).wait() for node in "ab"} == {AgentExit.NO_STORE}
    assert job.output.count("etcd has lost the data of job") == 2
    job.start("a", "b")  # the number of its next round was used before
    job.wait_for_end()
    assert final_hash(job.output) == undisturbed_hash
