"""Several engines in one process: each goes on from its own checkpoints after a lost node."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import ROOT, TOGETHER, environment
from tests.support.three_engines import NAMES
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.etcd]

SCRIPT = str(ROOT / "tests/support/three_engines.py")
STEPS, LOST_AT = 12, 6


def set_gate(directory: Path, step: int) -> None:
    new = directory / "gate.new"
    new.write_text(str(step))
    new.replace(directory / "gate")


@pytest.mark.full
def test_three_engines_lose_a_node_and_end_as_if_nothing_had_happened(
    cluster, tmp_path: Path
) -> None:
    job = cluster(flags=("--nnodes=1:2", "--max-restarts=2", TOGETHER))
    job.script = [SCRIPT, str(tmp_path), str(STEPS)]
    set_gate(tmp_path, LOST_AT)
    job.start("a", "b")
    kept = "checkpoints are kept in memory"
    wait_for(lambda: job.output.count(kept) == 3, 150, "checkpoints in memory of all three")
    job.agents.pop("b").kill_node()
    set_gate(tmp_path, STEPS)
    job.wait_for_end()

    loaded = re.findall(r"loaded /dev/shm/\S+, step (\d+)", job.output)
    assert len(loaded) == 3, "each from memory"
    assert all(1 <= int(step) <= LOST_AT for step in loaded)
    assert job.output.count("saved /") == 3, "at the end of the script"
    found = [line for line in job.output.splitlines() if line.startswith("hashes:")]
    assert found == [undisturbed(tmp_path / "alone")]
    assert [len(list((tmp_path / name).glob("step-*"))) for name in NAMES] == [1, 1, 1]


def undisturbed(directory: Path) -> str:
    """The hashes of one process that nothing happens to."""
    directory.mkdir()
    set_gate(directory, STEPS)
    command = [sys.executable, SCRIPT, str(directory), str(STEPS)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=150, check=True
    )
    return done.stdout.splitlines()[-1]
