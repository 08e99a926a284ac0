"""Under agents a worker is killed anywhere in its saves, on disk and in memory: nothing is lost."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.numerics.promises.back_ends import SAMPLES, STEPS
from tests.support.cluster import ROOT, agent, environment
from zero_data import read_ledger, verify

pytestmark = [pytest.mark.processes, pytest.mark.etcd, pytest.mark.full]

JOB = ROOT / "tests" / "support" / "killed_job.py"
PATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
TIMES = 5
"""How often each rank is killed, one job each."""


def ended(directory: Path, back_end: str, rank: int, number: int) -> tuple[int, str]:
    """Of a job whose rank dies before so many changes: those that rank 0 made, and the weights."""
    directory.mkdir()
    (directory / "kill").write_text(f"{rank} {number}")
    flags = ("--standalone", "--nproc-per-node=2", "--max-restarts=1")
    names = (f"--rdzv-id={directory.name}-{os.getpid()}", f"--log-dir={directory}/logs")
    done = agent(
        *(*flags, *names, str(JOB), back_end, str(directory)),
        env={**environment(), "PYTHONPATH": PATH},
    )
    assert done.returncode == 0, done.stderr
    ((changes, weights),) = re.findall(r"changes (\d+), weight hash (\S+)", done.stdout)
    report = verify(read_ledger(directory / "ledger"), SAMPLES)
    assert (report.problems, report.steps) == ((), STEPS)
    return int(changes), weights


@pytest.mark.timeout(600)
@pytest.mark.parametrize("back_end", ["ddp", "fsdp2", "stage3"])
def test_a_worker_killed_in_a_save_changes_neither_weights_nor_samples(
    tmp_path: Path, back_end: str
) -> None:
    changes, expected = ended(tmp_path / f"{back_end}-whole", back_end, 0, 0)
    for rank in range(2):
        for number in range(1 + rank, changes // (1 + rank), changes // TIMES):
            where = tmp_path / f"{back_end}-{rank}-{number}"
            assert ended(where, back_end, rank, number)[1] == expected, (rank, number)
