"""Lanes under zero-agent: who reads them is killed, and neither weights nor samples show it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import (
    ROOT,
    TOGETHER,
    Cluster,
    descendants,
    final_hash,
)
from tests.support.fresh import run_forked
from tests.support.lane_data import consumed
from tests.support.lanes_job import STEPS
from zero_data.ledger import read_ledger, verify

pytestmark = [pytest.mark.processes, pytest.mark.etcd]

JOB = str(ROOT / "tests" / "support" / "lanes_job.py")
PATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
"""The job imports what the tests share."""


def a_worker(job: Cluster) -> None:
    os.kill(job.worker_of("b"), signal.SIGKILL)


def an_agent(job: Cluster) -> None:
    """And with it its workers, and their loading processes."""
    job.agents["b"].process.kill()
    job.agents["b"].process.wait()


def a_loading_process(job: Cluster) -> None:
    os.kill(descendants(job.worker_of("b"))[0], signal.SIGKILL)


VICTIMS: dict[str, tuple[Callable[[Cluster], None], int]] = {
    "a worker": (a_worker, 2),
    "an agent": (an_agent, 1),
    "a loading process": (a_loading_process, 2),
}
"""Who is killed, and how many ranks go on."""
CASES = [
    ("ddp", "packed", 2, ["a worker", "an agent"]),
    ("ddp", "no state", 0, ["an agent"]),
    ("ddp", "a state", 2, ["a loading process"]),
    ("fsdp2", "a state", 0, ["a worker", "an agent"]),
    ("fsdp2", "no state", 2, ["a loading process", "an agent"]),
    ("stage0", "no state", 0, ["a worker", "an agent"]),
    ("stage3", "packed", 0, ["a worker", "an agent"]),
    ("stage3", "a state", 2, ["a loading process", "an agent"]),
]


@pytest.mark.parametrize(("back_end", "kind", "workers", "victims"), CASES, ids=str)
@pytest.mark.corners(back_end=["ddp"], kind=["no state"])
def test_whoever_is_killed_every_sample_and_document_is_trained_as_if_nobody_were(
    cluster: Any, tmp_path: Path, back_end: str, kind: str, workers: int, victims: list[str]
) -> None:
    job = cluster(
        flags=("--nnodes=1:2", "--max-restarts=2", TOGETHER),
        script=(JOB, back_end, kind, str(workers), str(tmp_path)),
        pause_s=1.0,
    )
    job.start("a", "b", PYTHONPATH=PATH)
    for number, victim in enumerate(victims):
        job.wait_for_step(4 + 4 * number, world=2)
        kill, left = VICTIMS[victim]
        kill(job)
        job.wait_for_step(5 + 4 * number, world=left)
    job.wait_for_end()
    alone = tmp_path / "alone"
    assert final_hash(job.output) == undisturbed(alone, back_end, kind)
    report = verify(read_ledger(tmp_path / "ledger"), None)
    assert (report.problems, report.steps) == ((), STEPS)
    assert consumed(tmp_path / "ledger") == consumed(alone / "ledger")


def undisturbed(directory: Path, back_end: str, kind: str) -> str:
    """One process, and nothing happens to it."""
    directory.mkdir()
    (directory / "pause").write_text("0")
    done = run_forked("tests.support.lanes_job", "plain", kind, 0, directory)
    assert done.returncode == 0, done.stderr
    return final_hash(done.stdout)
