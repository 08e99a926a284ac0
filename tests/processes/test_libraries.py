"""Libraries with loops of their own under zero-agent: killed, resized, streamed, to the same bits.

Each trains what a plain loop trains, so one hash is expected of all of them.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import ROOT, TOGETHER, agent, environment, final_hash
from tests.support.library_job import LIBRARIES, SAMPLES
from zero_data.ledger import read_ledger, verify

pytestmark = [pytest.mark.processes, pytest.mark.etcd]

JOB = ROOT / "tests" / "support" / "library_job.py"
OTHERS = LIBRARIES[1:]
VARIABLES = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The hash of a plain loop in one process, to which nothing happens."""

    @cache
    def of(data: str) -> str:
        return alone(tmp_path_factory.mktemp(data), "torch", data)

    return of


def alone(directory: Path, library: str, data: str, ranks: int = 1) -> str:
    (directory / "pause").write_text("0")
    job = (str(JOB), library, data, str(directory))
    flags = ("--standalone", f"--nproc-per-node={ranks}", "--max-restarts=1")
    done = agent(*flags, *job, env={**environment(), **VARIABLES})
    assert done.returncode == 0, done.stderr
    check_ledger(directory, data)
    return final_hash(done.stdout)


def check_ledger(directory: Path, data: str) -> None:
    report = verify(read_ledger(directory / "ledger"), None if data == "stream" else SAMPLES)
    assert (report.problems, report.samples) == ((), 2 * SAMPLES)


@pytest.mark.parametrize("data", ["rows", "stream"])
@pytest.mark.parametrize("library", OTHERS)
@pytest.mark.full
def test_a_killed_rank_costs_a_library_steps_and_no_bit(
    tmp_path: Path, expected: Any, library: str, data: str
) -> None:
    (tmp_path / "kill").write_text("6")
    assert alone(tmp_path, library, data, ranks=2) == expected(data)


@pytest.mark.full
@pytest.mark.parametrize("data", ["rows", "stream"])
@pytest.mark.parametrize("library", OTHERS)
def test_a_library_that_shards_by_fsdp2_is_exact_through_a_kill(
    tmp_path: Path, expected: Any, library: str, data: str
) -> None:
    (tmp_path / "kill").write_text("6")
    assert alone(tmp_path, f"{library}-fsdp2", data, ranks=2) == expected(data)


@pytest.mark.full
@pytest.mark.parametrize("data", ["rows", "stream"])
@pytest.mark.parametrize("library", [*OTHERS, *(f"{library}-fsdp2" for library in OTHERS)])
def test_a_library_is_exact_while_nodes_are_killed_and_join(
    cluster: Any, tmp_path: Path, expected: Any, library: str, data: str
) -> None:
    job = cluster(
        flags=("--nnodes=1:3", "--max-restarts=1", TOGETHER),
        script=(str(JOB), library, data, str(tmp_path)),
        pause_s=1.0,
    )
    job.start("a", "b", "c", **VARIABLES)
    job.wait_for_step(6, world=3)
    job.agents["c"].kill_node()
    job.pace(5.0)  # a node needs longer to begin than these steps take
    job.wait_for_step(7, world=2)
    job.start("d", **VARIABLES)  # the others leave at the end of a step
    job.wait_for_step(8, world=3)
    job.wait_for_end()
    check_ledger(tmp_path, data)
    assert final_hash(job.output) == expected(data)
