"""A node whose workers have finished is told to leave, dies, or sees another one come: the others
finish undisturbed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.cluster import COLD, Cluster
from tests.support.waiting import wait_for
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.observe import status

pytestmark = [pytest.mark.processes, pytest.mark.etcd]

SCRIPT = """\
import os, pathlib, sys, time
here, last = pathlib.Path(sys.argv[1]), sys.argv[2]
(here / f"started-{os.environ['RANK']}-{os.getpid()}").touch()
if os.environ["RANK"] == last:
    while not (here / "evaluated").exists():
        time.sleep(0.05)
"""
"""The given rank still evaluates when the other has finished."""


def finished(job: Cluster, store) -> list[str]:
    """The nodes that have reported that their workers are done."""
    prefix = Keys(job.job).report(1, "done")
    return [item.key.rpartition("/")[2] for item in store.range(prefix).items]


@pytest.mark.parametrize("happens", ["drained", "killed", "joined"])
@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.corners(last=[0], happens=["drained"])
def test_the_last_evaluation_of_a_job_outlives_what_happens_to_nodes_that_have_finished(
    cluster, etcd_store, tmp_path: Path, last: int, happens: str
):
    script = tmp_path / "evaluates.py"
    script.write_text(SCRIPT)
    job = cluster(
        flags=(f"--nnodes=2:{3 if happens == 'joined' else 2}", "--max-restarts=0", COLD),
        script=[str(script), str(tmp_path), str(last)],
    )
    job.start("a", "b")
    wait_for(lambda: finished(job, etcd_store), 60, "a node whose workers have finished")
    (done,) = finished(job, etcd_store)
    (still,) = {"a", "b"} - {done}
    match happens:
        case "drained":
            job.agents[done].process.send_signal(signal.SIGTERM)
            wait_for(lambda: "SIGTERM: leaving" in job.agents[done].output, 60, "a word about it")
        case "killed":
            job.agents.pop(done).kill_node()
        case "joined":
            job.start("c")
            wait_for(lambda: "done; spare: c" in job.output, 60, "a word about the spare")
    if happens == "drained" and last == 0:  # the first node stays: it hosts the store of the round
        assert job.agents.pop(done).wait() == 128 + signal.SIGTERM
    (tmp_path / "evaluated").touch()
    job.wait_for_end()
    ended = status.read(etcd_store, job.job)
    assert (ended.state, ended.restarts, ended.round) == ("DONE", 0, 1)
    assert len(list(tmp_path.glob("started-*"))) == 2, "each worker was started once"
    assert job.agents[still].process.returncode == 0
