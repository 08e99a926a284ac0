"""torchtitan's debug model under the plug-in: one hash, whatever is killed, at any world size."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import ROOT, TOGETHER, agent, environment, final_hash
from zero_data.ledger import read_ledger, verify

pytest.importorskip("torchtitan", reason="torchtitan is not installed")
pytestmark = [pytest.mark.processes, pytest.mark.etcd, pytest.mark.full]
JOB = ROOT / "tests" / "support" / "torchtitan_job.py"
STEPS, BATCH = 10, 10
VARIABLES = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "HF_HUB_OFFLINE": "1",
}


def alone(directory: Path, *more: str, ranks: int = 1) -> str:
    (directory / "pause").write_text("0")
    flags = ("--standalone", f"--nproc-per-node={ranks}", "--max-restarts=1")
    environ = {**environment(), **VARIABLES}
    done = agent(*flags, str(JOB), str(directory), *more, env=environ, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """torchtitan's seed checkpoint: on a CPU the weights that ranks draw follow their number."""
    directory = tmp_path_factory.mktemp("seed")
    alone(directory, "seed")
    return directory / "seed"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, seed: Path) -> str:
    """The hash of one undisturbed rank."""
    directory = tmp_path_factory.mktemp("expected")
    shutil.copytree(seed, directory / "seed")
    found = alone(directory)
    check_ledger(directory)
    return final_hash(found)


def check_ledger(directory: Path) -> None:
    report = verify(read_ledger(directory / "ledger"), None)
    assert (report.problems, report.samples) == ((), STEPS * BATCH)


def test_a_killed_rank_costs_torchtitan_steps_and_no_bit(
    tmp_path: Path, expected: str, seed: Path
) -> None:
    shutil.copytree(seed, tmp_path / "seed")
    (tmp_path / "kill").write_text("5")
    found = alone(tmp_path, ranks=2)
    check_ledger(tmp_path)
    assert final_hash(found) == expected


def test_torchtitan_is_exact_while_nodes_are_killed_and_join(
    cluster: Any, tmp_path: Path, expected: str, seed: Path
) -> None:
    shutil.copytree(seed, tmp_path / "seed")
    job = cluster(
        flags=("--nnodes=1:3", "--max-restarts=1", TOGETHER),
        script=(str(JOB), str(tmp_path)),
        pause_s=1.0,
    )
    job.start("a", "b", "c", **VARIABLES)
    job.wait_for_step(3, world=3, timeout_s=400)
    job.agents["c"].kill_node()
    job.pace(20.0)  # a node needs longer to begin than these steps take
    job.wait_for_step(4, world=2, timeout_s=400)
    job.start("d", **VARIABLES)  # the others leave at the end of a step
    job.wait_for_step(5, world=3, timeout_s=400)
    job.wait_for_end(timeout_s=400)
    check_ledger(tmp_path)
    assert final_hash(job.output) == expected
