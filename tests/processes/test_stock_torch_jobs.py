"""Stock PyTorch under zero-agent: nodes are killed and join, the weights do not show it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.cluster import ROOT, TOGETHER, agent, environment, final_hash
from tests.support.stock_job import EPOCHS, SAMPLES
from zero_data.ledger import read_ledger, verify

pytestmark = [pytest.mark.processes, pytest.mark.etcd]

PATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
"""The job imports what the tests share."""
JOB = ROOT / "tests" / "support" / "stock_job.py"


@pytest.mark.full
@pytest.mark.parametrize(("wrapper", "world"), [("ddp", 2), ("fsdp2", 4), ("hsdp", 4)])
def test_a_killed_node_and_a_late_one_change_neither_weights_nor_samples(
    cluster, tmp_path: Path, wrapper: str, world: int
) -> None:
    """Under HSDP the mesh changes, too: two replicas, one, and two again."""
    job = cluster(
        flags=(f"--nnodes=1:{world}", "--max-restarts=1", TOGETHER),
        script=(str(JOB), wrapper, str(tmp_path)),
        pause_s=1.5,  # the late node comes before the end, however busy the machine is
    )
    nodes = "abcd"[:world]
    job.start(*nodes, PYTHONPATH=PATH)
    job.wait_for_step(7, world=world)
    job.agents[nodes[-1]].kill_node()
    job.wait_for_step(8, world=world - 1)
    job.start("e", PYTHONPATH=PATH)
    job.wait_for_step(12, world=world)
    job.wait_for_end()
    report = verify(read_ledger(tmp_path / "ledger"), SAMPLES)
    assert (report.problems, report.samples) == ((), EPOCHS * SAMPLES)
    assert final_hash(job.output) == undisturbed(tmp_path / "alone")
    assert job.events("world size") == []


@pytest.mark.full
@pytest.mark.parametrize("data", [(), ("stream",)], ids=["map-style", "stream"])
def test_a_killed_node_and_a_late_one_cost_the_other_no_process_under_ddp(
    cluster, tmp_path: Path, data: tuple[str, ...]
) -> None:
    job = cluster(
        flags=("--nnodes=1:2", "--max-restarts=1", TOGETHER),
        script=(str(JOB), "ddp", str(tmp_path), "in-place", *data),
        pause_s=1.5,
    )
    job.start("a", "b", PYTHONPATH=PATH)
    job.wait_for_step(7, world=2)
    pid = job.worker_of("a")
    job.agents.pop("b").kill_node()
    job.wait_for_step(8, world=1)
    job.start("c", PYTHONPATH=PATH)
    job.wait_for_step(12, world=2)
    assert job.worker_of("a") == pid
    job.pace(0)
    job.wait_for_end()
    if not data:
        report = verify(read_ledger(tmp_path / "ledger"), SAMPLES)
        assert (report.problems, report.samples) == ((), EPOCHS * SAMPLES)
    assert final_hash(job.output) == undisturbed(tmp_path / "alone", *data)
    stays = [(each["round"], each["node"], each["stay"]) for each in job.events("start")]
    assert sorted(stays) == [(1, "a", 0), (1, "b", 0), (2, "a", 1), (3, "a", 1), (3, "c", 0)]
    assert [each["node"] for each in job.events("warm up")] == ["c", "c"]  # and is then ready


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 3])
def test_a_killed_worker_costs_no_process_of_another_node_with_two_under_ddp(
    cluster, tmp_path: Path, victim: int
) -> None:
    job = cluster(
        flags=("--nnodes=2", "--nproc-per-node=2", "--max-restarts=1", TOGETHER),
        script=(str(JOB), "ddp", str(tmp_path), "in-place"),
        pause_s=1.5,
    )
    job.start("a", "b", PYTHONPATH=PATH)
    job.wait_for_step(7, world=4)
    pids = {each["rank"]: each["pid"] for each in job.events("worker")}
    os.kill(pids[victim], signal.SIGKILL)
    job.wait_for_step(12, world=4)
    job.wait_for_end()
    report = verify(read_ledger(tmp_path / "ledger"), SAMPLES)
    assert (report.problems, report.samples) == ((), EPOCHS * SAMPLES)
    assert final_hash(job.output) == undisturbed(tmp_path / "alone")
    anew = [each["rank"] for each in job.events("worker") if each["pid"] not in pids.values()]
    assert sorted(anew) == sorted([victim, victim ^ 1])  # those of its node
    assert sorted(each["stay"] for each in job.events("start")) == [0, 0, 0, 2]


def undisturbed(directory: Path, *data: str) -> str:
    """One process, and nothing happens to it."""
    directory.mkdir()
    (directory / "pause").write_text("0")
    given = ("--standalone", str(JOB), "plain", str(directory), *data)
    done = agent(*given, env={**environment(), "PYTHONPATH": PATH})
    assert done.returncode == 0, done.stderr
    return final_hash(done.stdout)
