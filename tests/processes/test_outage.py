"""etcd goes away while a job runs: the workers go on, and no restart is charged."""

from __future__ import annotations

import signal

import pytest

from tests.processes.test_elastic import assert_as_if_nothing_had_happened
from tests.support.cluster import Cluster
from tests.support.etcd_server import server
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.etcd]


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
        ("killed and restarted", 0.03, 30),
        ("stopped and continued", 0.03, 30),
        pytest.param(
            "killed and restarted",
            0.6,
            100,
            marks=[pytest.mark.slow, pytest.mark.timeout(300)],
            id="for a minute",
        ),
    ],
)
def test_an_outage_of_etcd_costs_no_restart_and_no_step(
    own, outage, pause_s, steps, undisturbed_hash
):
    """It lasts for so many steps, each of which takes longer than its pause."""
    job, etcd = own
    job.pause_s = pause_s
    job.start("a", "b")
    job.wait_for_step(15, world=2)
    etcd.kill() if outage.startswith("killed") else etcd.suspend()
    before = steps_done(job)
    wait_for(lambda: steps_done(job) > before + steps, 120, "steps without etcd")
    wait_for(lambda: "etcd cannot be reached" in job.output, 30, "a word about it")
    etcd.start() if outage.startswith("killed") else etcd.resume()
    assert_as_if_nothing_had_happened(job, undisturbed_hash)
    assert job.report().repeated_steps == 0
    assert len(job.events("activate")) == 1, "one round from the beginning to the end"


def test_a_node_that_is_told_to_leave_during_an_outage_does_so_for_free_when_it_is_over(
    own, undisturbed_hash
):
    job, etcd = own
    job.start("a", "b")
    job.wait_for_step(15, world=2)
    etcd.kill()
    job.agents["a"].process.send_signal(signal.SIGTERM)
    wait_for(lambda: "SIGTERM: leaving when etcd answers" in job.output, 30, "a word about it")
    etcd.start()
    assert job.agents.pop("a").wait() == 128 + signal.SIGTERM
    assert_as_if_nothing_had_happened(job, undisturbed_hash)
    assert (job.report().repeated_steps, job.events("interrupt")) == (0, [])
