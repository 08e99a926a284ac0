"""A rank that is slow, or stuck, is named, with its node, within a minute."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.cluster import TOGETHER, light_imports
from tests.support.suspended import suspend
from tests.support.waiting import wait_for
from zero_orchestrator.observe import status
from zero_orchestrator.observe.verdicts import Kind

pytestmark = [pytest.mark.processes, pytest.mark.etcd]

SCRIPT = str(Path(__file__).parents[1] / "support" / "slow_ranks.py")
LONG_S = 150.0


def told(job, event):
    """The first event of this name."""
    wait_for(lambda: job.events(event) or job.check_agents(), LONG_S, f"an event {event}")
    return job.events(event)[0]


@pytest.mark.full
def test_a_slow_rank_and_then_a_stuck_one_are_named_with_node_and_line(
    cluster, etcd_store, tmp_path
):
    job = cluster(flags=("--nnodes=1", "--nproc-per-node=3"), script=[SCRIPT, str(tmp_path)])
    (tmp_path / "slow-1").write_text("0.1")
    job.start("a")
    event = told(job, "straggler")
    assert (event["rank"], event["host"], event["slow"]) == (1, "a", True)
    assert 1.25 <= event["factor"] < 3, event
    assert re.match(r"rank 1 on a computes \d\.\d x slower since step \d+, and", event["text"])
    held = wait_for(
        lambda: status.read(etcd_store, job.job).verdicts, LONG_S, "that status shows it"
    )
    assert [(one.rank, one.text) for one in held] == [(1, event["text"])]

    (tmp_path / "slow-2").write_text("stuck")
    event = told(job, "stuck")
    assert (event["ranks"], event["hosts"], event["stuck"]) == ([2], ["a"], True)
    assert re.fullmatch(
        r"no step for \d+ s, since step \d+: rank 2 on a is in stick \(slow_ranks.py:\d+\); "
        r"2 ranks wait for it in [\w .,']+, from main \(slow_ranks.py:\d+\)",
        event["text"],
    )

    def stuck():
        return [one for one in status.read(etcd_store, job.job).verdicts if one.kind is Kind.STUCK]

    (now,) = wait_for(stuck, LONG_S, "that status shows it")
    assert (now.rank, now.text) == (2, event["text"])


PLAIN = """
import os, pathlib, time
import zero_agent

def read_a_shard():
    time.sleep(600)

for step in range(1, 10_000):
    time.sleep(0.1)
    if step == 9 and os.environ["RANK"] == "1":
        read_a_shard()
    while step >= 9:
        time.sleep(0.1)
    zero_agent.heartbeat(step)
"""


@pytest.mark.full
def test_a_plain_script_is_judged_by_its_stacks_and_a_stopped_worker_by_its_state(
    cluster, tmp_path
):
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    flags = ("--nnodes=3", "--hang-timeout=60", "--max-restarts=0", TOGETHER)
    job = cluster(flags=flags, script=[str(script)])
    job.start("a", "b", "c", PYTHONPATH=light_imports(tmp_path)["PYTHONPATH"])
    event = told(job, "stuck")
    (rank,) = event["ranks"]
    (host,) = event["hosts"]
    assert rank == 1
    assert f"rank 1 on {host} is in read_a_shard (plain.py:6); 2 ranks are in" in event["text"]
    wait_for(lambda: len(job.events("hang")) == 3, LONG_S, "that each node names its own worker")
    for hang in job.events("hang"):
        assert "(limit 60.0 s, --hang-timeout); rank 1 on " in hang["text"]


@pytest.mark.full
@pytest.mark.parametrize("stop", [True, False])
def test_on_three_nodes_the_stuck_rank_is_named(cluster, tmp_path, stop):
    job = cluster(flags=("--nnodes=3", TOGETHER), script=[SCRIPT, str(tmp_path)])
    job.start("a", "b", "c")
    wait_for(lambda: len(job.events("worker")) == 3 or job.check_agents(), LONG_S, "workers")
    wait_for(lambda: (tmp_path / "stepped").exists() or job.check_agents(), LONG_S, "steps")
    pid = job.worker_of("c")
    (rank,) = (one["rank"] for one in job.events("worker") if one["pid"] == pid)
    if stop:
        suspend(pid)
    else:
        (tmp_path / f"slow-{rank}").write_text("stuck")
    event = told(job, "stuck")
    assert (event["ranks"], event["hosts"]) == ([rank], ["c"])
    where = "state T (stopped)" if stop else "is in stick (slow_ranks.py:"
    assert where in event["text"], event["text"]
    if stop:
        os.kill(pid, signal.SIGCONT)
        wait_for(lambda: len(job.events("stuck")) == 2, LONG_S, "that steps are taken again")
        assert job.events("stuck")[1]["stuck"] is False
