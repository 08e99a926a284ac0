"""A worker that SIGKILL does not end: its node leaves, and says where the worker is."""

from __future__ import annotations

import os
import re
import signal
import subprocess

import pytest

from tests.support.cluster import COLD, TOGETHER
from tests.support.frozen import frozen, why_not
from tests.support.manual_clock import ManualClock
from tests.support.waiting import wait_for
from zero_agent.workers.environment import StartOrder
from zero_agent.workers.group import WorkerGroup
from zero_agent.workers.stacks import GIVE_UP_S, describe
from zero_contract.exit_codes import AgentExit
from zero_contract.hub import Hub

freezes = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@freezes
def test_where_a_process_is_that_does_not_die_can_be_read():
    with subprocess.Popen(["sleep", "60"]) as process:
        with frozen(process.pid):
            process.kill()
            # While a process runs, be it for an instant, the kernel does not tell where it is.
            wait_for(lambda: "waiting in" in describe(process.pid), 60, "the process waits")
            text = describe(process.pid)
            assert process.poll() is None
        assert process.wait(30) == -signal.SIGKILL
    assert text.startswith(f"process {process.pid} (sleep) in state D (uninterruptible sleep), ")
    assert re.search(r"waiting in \w+; kernel stack: \w+( < \w+)+$", text)
    assert describe(process.pid) == f"process {process.pid}, of which /proc shows nothing"


class Forkserver:
    """Takes orders, and nothing comes of them."""

    pid = os.getpid()

    def signal(self, worker: int, number: int) -> None: ...


def test_workers_are_given_up_some_time_after_sigkill_and_never_before_it():
    clock = ManualClock()
    group = WorkerGroup(Forkserver(), Hub(), 1, fence=1, clock=clock)
    group._running[1] = StartOrder(rank=3, local_rank=0, env={"TORCHELASTIC_ERROR_FILE": ""})
    group.stop(signal.SIGTERM)
    clock.advance(10 * GIVE_UP_S)
    assert group.unkillable == ""
    group.stop(signal.SIGKILL)
    clock.advance(GIVE_UP_S)
    assert group.unkillable == ""
    clock.advance(0.1)
    assert group.unkillable.startswith(
        f"not ended 20 s after SIGKILL: rank 3: process {os.getpid()}"
    )
    group.ended(1, -signal.SIGKILL)
    assert group.unkillable == ""


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.etcd
@freezes
def test_a_node_whose_worker_cannot_be_killed_leaves_and_the_others_go_on(cluster, tmp_path):
    enough, script = tmp_path / "enough", tmp_path / "waits.py"
    script.write_text(
        "import pathlib, time\n"
        f"while not pathlib.Path({str(enough)!r}).exists(): time.sleep(0.02)\n"
    )
    job = cluster(flags=("--nnodes=1:2", "--max-restarts=1", TOGETHER, COLD), script=[str(script)])
    job.start("a", "b")
    wait_for(lambda: len(job.events("worker")) == 2, 60, "both workers")
    stuck = job.worker_of("a")
    with frozen(stuck):
        os.kill(job.worker_of("b"), signal.SIGKILL)
        assert job.agents["a"].wait(90) == AgentExit.UNHEALTHY
        wait_for(lambda: len(job.events("worker")) == 3, 60, "the next round")
        enough.touch()
        assert job.agents["b"].wait(60) == 0
    said = job.agents["a"].output
    assert "this node has left the job, which continues without it" in said
    assert f"process {stuck} (python" in said
    assert "in state D (uninterruptible sleep), waiting in " in said
    assert job.events("activate")[-1]["nodes"] == ["b"]
    assert len(job.events("interrupt")) == 1, "the node that left is not charged"
