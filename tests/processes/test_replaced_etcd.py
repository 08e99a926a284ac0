"""etcd is replaced while a job runs: by a copy of its data, or by that of another job."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.processes.test_elastic import assert_as_if_nothing_had_happened
from tests.processes.test_outage import steps_done
from tests.support.cluster import COLD, TOGETHER, Cluster
from tests.support.etcd_server import EtcdServer, server
from tests.support.waiting import wait_for
from zero_agent.etcd.etcd_process import Member, find_etcd
from zero_contract.exit_codes import AgentExit
from zero_orchestrator.store.etcd.client import EtcdStore

pytestmark = [pytest.mark.processes, pytest.mark.etcd, pytest.mark.full]

LATER = 3000
"""More revisions than a test's job makes."""


@pytest.fixture
def own(tmp_path, tmp_path_factory):
    """A job of two nodes with an etcd of its own."""
    with server(tmp_path_factory.mktemp("etcd")) as etcd:
        job = Cluster(tmp_path, etcd.endpoint, flags=("--nnodes=2:2", "--max-restarts=0", TOGETHER))
        yield job, etcd
        job.close()


def advance(etcd: EtcdServer) -> None:
    """Write until its revision is later than that of any other etcd of the test."""
    store = EtcdStore(etcd.endpoint)
    for number in range(LATER):
        store.put("/later", str(number))
    store.close()


def as_other_cluster(data: Path, to: Path) -> None:
    """What `etcdutl snapshot restore` makes of a copy: its members are a cluster of their own."""
    tool = find_etcd().with_name("etcdutl")
    words = [str(tool), "snapshot", "restore", str(data / "member/snap/db"), "--skip-hash-check"]
    words += [f"--data-dir={to}", "--name=zero", "--initial-cluster=zero=http://127.0.0.1:1"]
    words += ["--initial-advertise-peer-urls=http://127.0.0.1:1", "--initial-cluster-token=other"]
    subprocess.run(words, check=True, capture_output=True)


def test_another_cluster_with_the_data_of_the_job_is_noticed_by_all_and_costs_nothing(
    own, undisturbed_hash, tmp_path
):
    job, etcd = own
    job.start("a", "b")
    job.wait_for_step(15, world=2)
    etcd.stop()
    as_other_cluster(etcd.member.data, other := tmp_path / "other")
    member = Member(data=other, client_port=etcd.member.client_port)
    with contextlib.closing(EtcdServer(tmp_path, member)) as restored:
        advance(restored.start())
        wait_for(lambda: job.output.count("is another cluster") == 2, 150, "two words about it")
        job.wait_for_step(steps_done(job) + 5, world=2)
        assert_as_if_nothing_had_happened(job, undisturbed_hash)
    assert len(job.events("activate")) == 1


def test_an_ended_job_of_the_same_name_ends_no_other(own, tmp_path):
    job, etcd = own
    advance(etcd)
    options = {"flags": ("--nnodes=1", COLD), "script": ("--no-python", "true")}
    ended = Cluster(tmp_path, etcd.endpoint, **options)
    ended.start("a")
    ended.wait_for_end()
    etcd.stop()
    shutil.move(etcd.member.data, other := tmp_path / "other")
    etcd.start()
    job.pace(0.2)
    job.start("a", "b")
    job.wait_for_step(15, world=2)
    etcd.kill()
    shutil.rmtree(etcd.member.data)
    shutil.move(other, etcd.member.data)
    etcd.start()
    assert {job.agents.pop(node).wait() for node in "ab"} == {AgentExit.NO_STORE}
    assert job.output.count("has another job of this name") == 2
