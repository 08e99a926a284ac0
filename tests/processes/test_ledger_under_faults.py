"""Every second of every node has one use in the goodput ledger, also with a drain and a partition.

Machines are network namespaces, etcd is real, and the workers are a script that counts.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
import time

import pytest

from tests.processes.test_partitions import PORT, on_machines
from tests.support.cluster import COLD, TOGETHER, Cluster, environment
from tests.support.waiting import wait_for
from zero_contract.exit_codes import AgentExit
from zero_orchestrator.observe.events import goodput_prefix
from zero_orchestrator.observe.goodput import Use, from_record, total_ns

pytestmark = [pytest.mark.processes, pytest.mark.etcd, pytest.mark.netns, pytest.mark.full]

COUNTS = """
import os, pathlib, sys, time
import zero_agent
here = pathlib.Path(sys.argv[1])
path = here / ".".join(os.environ[k] for k in ("ZERO_ROUND", "WORLD_SIZE", "RANK"))
step = 0
while not (here / "enough").exists():
    time.sleep(0.2)
    step += 1
    zero_agent.heartbeat(step)
    path.write_text(str(step))
"""
STEPS = 8
LATE_S = 3.0
"""The time from the last write of a ledger to the end of its process, on a busy machine."""


class Nodes:
    """The wall time of each node, from the start of its agent to the end."""

    def __init__(self, machines):
        self.machines, self.wall_s, self._threads = machines, {}, []

    def start(self, *names):
        for name in names:
            began_s = time.monotonic()
            self.machines.start(name)
            process = self.machines.job.agents[name].process
            thread = threading.Thread(target=self._wait, args=(name, process, began_s))
            thread.start()
            self._threads.append(thread)

    def _wait(self, name, process, began_s):
        process.wait()
        self.wall_s[name] = time.monotonic() - began_s

    def wait_for_end(self):
        self.machines.job.wait_for_end()
        for thread in self._threads:
            thread.join()

    def ledger(self, name):
        """What etcd has of the time of a node, as its own gateway tells."""
        key = base64.b64encode(f"{goodput_prefix(self.machines.job.job)}{name}".encode()).decode()
        with self.machines.net.inside("store"):
            (item,) = self.machines.etcd.call("kv/range", key=key)["kvs"]
        return from_record(json.loads(base64.b64decode(item["value"]))["ns"])


@pytest.fixture
def machines(tmp_path, tmp_path_factory):
    """With a job that counts."""
    script = tmp_path / "counts.py"
    script.write_text(COUNTS)
    counts = tmp_path / "counts"
    counts.mkdir()

    def job(endpoint):
        flags = ("--nnodes=1:3", "--max-restarts=3", TOGETHER, COLD)
        return Cluster(tmp_path, endpoint, flags=flags, script=[str(script), str(counts)])

    with on_machines(tmp_path_factory.mktemp("etcd"), job, "abc") as found:
        yield found


def run_until(job, n, world):
    """Wait until all workers of a round have taken some steps."""

    def stepped():
        job.check_agents()
        texts = [path.read_text() for path in (job.directory / "counts").glob(f"{n}.{world}.*")]
        return len(texts) == world and all(int(text or 0) >= STEPS for text in texts)

    wait_for(stepped, 150, f"round {n} with {world} workers")


def test_the_time_of_nodes_with_a_drain_and_a_partition_is_their_wall_time(machines):
    job, nodes = machines.job, Nodes(machines)
    nodes.start("a", "b", "c")
    run_until(job, 1, world=3)
    drain = [sys.executable, "-m", "zero_orchestrator", "drain", "c", "--wait=60"]
    with machines.net.inside("store"):
        where = {"PET_RDZV_ENDPOINT": f"127.0.0.1:{PORT}"}
        subprocess.run(drain, env={**environment(), **where}, check=True, timeout=120)
    assert job.agents.pop("c").wait() == AgentExit.DRAINED
    run_until(job, 2, world=2)
    machines.net.cut("b", "store", "a")
    run_until(job, 3, world=1)
    machines.net.heal("b", "store", "a")
    run_until(job, 4, world=2)
    (job.directory / "counts" / "enough").touch()
    nodes.wait_for_end()
    ledgers = {name: nodes.ledger(name) for name in "abc"}
    for name, used_ns in ledgers.items():
        lacks_s = nodes.wall_s[name] - total_ns(used_ns) / 1e9
        assert -0.1 <= lacks_s < LATE_S, (name, nodes.wall_s, used_ns)
    for name in "ab":
        assert {Use.USEFUL, Use.STARTING, Use.REFORMING} <= ledgers[name].keys()
