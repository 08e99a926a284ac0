"""Scripts as written for DeepSpeed, with other imports: alone, under torchrun, under an agent."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.cluster import environment

pytestmark = pytest.mark.processes

SCRIPTS = Path(__file__).resolve().parents[1] / "data" / "scripts"
LAUNCHERS = {
    "alone": [],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    "zero-agent": ["-m", "zero_agent", "--standalone", "--nproc-per-node=2"],
}


def run(launcher: str, script: str, *arguments: object) -> list[str]:
    """What rank 0 printed."""
    done = subprocess.run(
        [sys.executable, *LAUNCHERS[launcher], str(SCRIPTS / script), *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.full
def test_the_tutorials_script_gives_one_result_under_every_launcher_at_every_stage() -> None:
    runs = [("alone", 0), ("torchrun", 1), ("zero-agent", 3)]
    outputs = [run(launcher, "classify.py", "--stage", stage) for launcher, stage in runs]
    for word in ("weights", "accuracy"):
        assert len({line for out in outputs for line in out if line.startswith(word)}) == 1


def test_the_tutorials_script_trains_in_half_precision() -> None:
    *_, accuracy, weights = run("alone", "classify.py", "--stage=2", "--dtype=fp16", "--epochs=3")
    assert float(accuracy.removeprefix("accuracy ")) > 0.2  # of ten classes
    assert len(weights.removeprefix("weights v2:")) == 64


@pytest.mark.full
def test_a_script_with_its_own_loader_optimizer_and_schedule_resumes_at_another_stage(
    tmp_path: Path,
) -> None:
    whole = finetune(tmp_path / "whole", "--zero_stage=0")
    finetune(tmp_path / "parts", "--zero_stage=2", "--num_train_epochs=1")
    assert finetune(tmp_path / "parts", "--zero_stage=3", "--offload") == whole
    plain, halved = (
        torch.load(tmp_path / "parts" / name) for name in ("pytorch_model.bin", "half.bin")
    )
    assert set(plain) == set(halved) - {"lm_head.weight"}  # of tied parameters, one name
    assert all(torch.equal(plain[name], halved[name]) for name in plain)


def finetune(directory: Path, *flags: str) -> tuple[str, int, float, str]:
    """The weights' hash, the steps, a sum read back from the checkpoint, the last epoch's line."""
    *_, epoch, last = run("alone", "finetune.py", f"--output_dir={directory}", *flags)
    result = json.loads(last)
    return result["weights"], result["steps"], result["sum"], epoch


SAVES_ALONE = """
import sys, torch, zero_engine
is_async = bool(sys.argv[2:])
optimizer, checkpoint = {"type": "AdamW"}, {"async": is_async}
settings = {"train_batch_size": 4, "optimizer": optimizer, "checkpoint": checkpoint}
engine = zero_engine.initialize(model=torch.nn.Linear(4, 2), config=settings)
engine.backward(engine(torch.ones(2, 4)).sum())
engine.step()
if torch.distributed.get_rank() == 0:
    engine.save_checkpoint(sys.argv[1])
"""


@pytest.mark.full
@pytest.mark.parametrize("how", [[], ["in the background"]], ids=["waits", "in the background"])
@pytest.mark.parametrize("launcher", ["torchrun", "zero-agent"])
def test_a_script_that_ends_with_a_save_of_rank_0_alone_says_so_and_ends(tmp_path, launcher, how):
    (tmp_path / "script.py").write_text(SAVES_ALONE)
    command = [
        sys.executable,
        *LAUNCHERS[launcher],
        tmp_path / "script.py",
        tmp_path / "saved",
        *how,
    ]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    assert "rank 0 waits for a save, which rank 1 has not begun" in done.stderr
