"""TRL's trainers under the plug-in: one hash at one rank, and at two of which one is killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.cluster import ROOT, agent, environment, final_hash

pytest.importorskip("trl", reason="TRL is not installed")
JOB = ROOT / "tests" / "support" / "trl_job.py"


@pytest.mark.parametrize("kind", ["sft", "packed"])
def test_a_killed_rank_costs_a_trainer_of_trl_steps_and_no_bit(tmp_path: Path, kind: str) -> None:
    found = set()
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    for ranks in (1, 2):
        directory = tmp_path / str(ranks)
        directory.mkdir()
        (directory / "pause").write_text("0")
        (directory / "kill").write_text("3" if ranks > 1 else "0")
        done = agent(
            "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=1", str(JOB), kind,
            str(directory),
            env={**environment(), "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.add(final_hash(done.stdout))
    assert len(found) == 1
