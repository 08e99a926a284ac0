"""TRL's trainers under the plug-in: one hash at one rank, and at two of which one is killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.cluster import ROOT, agent, environment, final_hash
from zero_data.ledger import read_ledger, verify

pytest.importorskip("trl", reason="TRL is not installed")
pytestmark = [pytest.mark.processes, pytest.mark.etcd, pytest.mark.full]
JOB = ROOT / "tests" / "support" / "trl_job.py"


@pytest.mark.parametrize("kind", ["sft", "packed", "dpo", "grpo"])
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
            env={**environment(), "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        entries = read_ledger(directory / "ledger")
        latest = {entry.step: entry.round for entry in sorted(entries, key=lambda it: it.round)}
        samples = {
            (entry.step, microbatch, ids)
            for entry in entries
            for microbatch, ids in entry.microbatches.items()
            if entry.round == latest[entry.step]
        }
        if kind != "grpo":  # drops the end of an epoch that fills no step, as TRL does
            size = 1 + max(number for _, _, ids in samples for number in ids)
            assert not verify(entries, size).problems
        found.add((final_hash(done.stdout), frozenset(samples)))
    assert len(found) == 1
