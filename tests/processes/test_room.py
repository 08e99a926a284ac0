"""A checkpoint disk that is full while a job runs: said, waited out, and charged to nobody."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import LONG_S, STEPS, final_hash, run_alone
from tests.support.waiting import wait_for
from zero_orchestrator.ctl.page import picture as pictures
from zero_orchestrator.observe import events, status

pytestmark = [pytest.mark.processes, pytest.mark.etcd, pytest.mark.full]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB where the checkpoints go."""
    where = tmp_path / "checkpoints"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(where)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs needs privileges")
    yield where
    subprocess.run(["umount", "--lazy", str(where)], check=True)


def fill(path: Path) -> None:
    """Take all the room there is."""
    done = subprocess.run(["cp", "/dev/zero", str(path)], capture_output=True, check=False)
    assert b"No space left" in done.stderr


def test_a_full_disk_costs_a_job_no_restart_and_the_end_is_that_of_an_undisturbed_run(
    cluster, etcd_store, disk, tmp_path_factory
):
    job = cluster(flags=("--nnodes=2", "--max-restarts=0"))
    job.start("a", "b")
    job.wait_for_step(1, world=2)
    fill(disk / "somebody-else")
    wait_for(lambda: "was not saved; training continues" in job.output, 150, "a save without room")
    failing = wait_for(
        lambda: status.read(etcd_store, job.job).failing_saves, 60, "what status says of it"
    )
    assert failing.saves >= 1
    assert "No space left on device" in failing.in_words()
    job.pace(LONG_S)
    missed = max(step for step, _ in job.last_steps().values())
    job.wait_for_step(missed + 2, world=2)
    (disk / "somebody-else").unlink()
    job.wait_for_end()
    ended = status.read(etcd_store, job.job)
    assert (ended.state, ended.restarts, ended.checkpoint["step"]) == ("DONE", 0, STEPS)
    assert ended.failing_saves is None
    records = [event.record for event in events.read(etcd_store, job.job)]
    told = [record["failed"] for record in records if record["event"] == "save"]
    assert told == [True, False]
    assert final_hash(job.output) == run_alone(tmp_path_factory.mktemp("alone"))


def test_a_last_save_that_waits_for_room_is_seen_to_wait_and_its_time_is_that_of_a_save(
    cluster, etcd_store, disk
):
    """Not 'training', nor a step that is stuck: neither in the ledger nor in the timelines."""
    job = cluster(flags=("--nnodes=1", "--max-restarts=0"))
    job.start("a")
    job.wait_for_step(1, world=1)
    fill(disk / "somebody-else")
    job.pace(0)

    def waited_s() -> float:
        found = pictures.picture(pictures.read(etcd_store, job.job), now_s=time.time())
        return sum(
            (to_s or found["range"][1]) - from_s
            for from_s, to_s, phase in found["timelines"][0]["spans"]
            if phase == "saving"
        )

    wait_for(lambda: waited_s() > 15.0, 150, "a save that waits in the timeline of its node")
    found = pictures.picture(pictures.read(etcd_store, job.job), now_s=time.time())
    (problem,) = found["problems"]
    assert (problem["kind"], problem["to_s"]) == ("saves fail", None)
    assert "; waiting for room, " in problem["text"]
    assert "stuck" not in {phase for _, _, phase in found["timelines"][0]["spans"]}
    (disk / "somebody-else").unlink()
    job.wait_for_end()
    ended = status.read(etcd_store, job.job)
    assert ended.time_ns["save_stalls"] > 15e9
    assert "stuck" not in ended.time_ns
