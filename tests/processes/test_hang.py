"""A worker that runs and takes no step is found out, shown, and replaced."""

from __future__ import annotations

import pytest

from tests.processes.test_elastic import assert_as_if_nothing_had_happened
from tests.support.cluster import training
from tests.support.suspended import suspend

pytestmark = [pytest.mark.processes, pytest.mark.etcd]

FLAGS = ("--nnodes=2", "--max-restarts=1", "--hang-timeout=6")
STUCK = """
import os, pathlib, runpy, sys, time
import zero_deepspeed
step, mark = zero_deepspeed.DeepSpeedEngine.step, pathlib.Path(sys.argv[1])
def stuck_once(engine):
    step(engine)
    if engine.global_steps == 25 and engine.global_rank == 1 and not mark.exists():
        mark.touch()
        time.sleep(600)
zero_deepspeed.DeepSpeedEngine.step = stuck_once
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.full
def test_a_stopped_worker_is_replaced_for_one_restart(cluster, undisturbed_hash):
    job = cluster(flags=FLAGS)
    job.start("a", "b")
    job.wait_for_step(25, world=2)
    suspend(job.worker_of("b"))
    assert_as_if_nothing_had_happened(job, undisturbed_hash)
    assert len(job.events("interrupt")) == 1
    hang = job.events("hang")[0]
    assert "no step for 6" in hang["text"]
    assert (hang["rank"], hang["pid"]) in {(e["rank"], e["pid"]) for e in job.events("worker")}


@pytest.mark.full
def test_where_every_worker_hangs_is_written_down_before_it_is_killed(
    cluster, tmp_path, undisturbed_hash
):
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    job = cluster(flags=FLAGS, script=[str(script), f"{tmp_path}/mark", *training(tmp_path)])
    job.start("a", "b")
    assert_as_if_nothing_had_happened(job, undisturbed_hash)
    stacks = [path.read_text() for path in (tmp_path / "logs").rglob("attempt_0/0/stacks.txt")]
    assert len(stacks) == 2, "one of each node"
    assert sum("in stuck_once" in text for text in stacks) == 1
    assert sum("collectives.py" in text for text in stacks) == 1, "the other waits for it"
