"""The examples do what their first lines say, and are short enough to be read."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cluster import ROOT, Cluster, agent, environment
from tests.support.waiting import wait_for

pytestmark = pytest.mark.processes

EXAMPLES = ROOT / "examples"
SHORT = (
    *("minimal.py", "plain_ddp.py", "fsdp2.py", "lightning_ddp.py", "trainer_hf.py"),
    "job.yaml",
)
TWO = ("--standalone", "--nproc-per-node=2")


def check_installed(script: str) -> None:
    if "lightning" in script:
        pytest.importorskip("lightning", reason="Lightning is not installed")


def weights(output: str) -> str:
    [found] = re.findall(r"^step 48, weights (v2:[0-9a-f]{64})$", output, re.MULTILINE)
    return str(found)


def alone(directory: Path) -> str:
    """What examples/minimal.py prints in a process without a launcher."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / "minimal.py", directory],
        env=environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", SHORT)
def test_an_example_fits_on_a_screen(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) <= 60


def test_the_minimal_example_trains_and_saves(tmp_path: Path) -> None:
    assert weights(alone(tmp_path / "checkpoints"))
    assert (tmp_path / "checkpoints" / "latest").exists()


@pytest.mark.full
def test_the_minimal_example_has_the_same_weights_on_two_ranks_and_when_it_resumes(
    tmp_path: Path,
) -> None:
    one = weights(alone(tmp_path / "one"))
    done = agent(*TWO, str(EXAMPLES / "minimal.py"), str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr
    assert {weights(done.stdout), weights(alone(tmp_path / "two"))} == {one}


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "size", "saved"),
    [
        ("plain_ddp.py", "EPOCHS, SAVE_EVERY = 10**6, 100", "state/*/MANIFEST.json"),
        ("fsdp2.py", "EPOCHS, SAVE_EVERY = 10**6, 100", "state/*/MANIFEST.json"),
        ("lightning_ddp.py", "EPOCHS = 10**6", "state/last.ckpt"),
    ],
)
def test_a_stock_script_leaves_with_a_save_when_a_node_joins(
    tmp_path: Path, cluster: Callable[..., Cluster], script: str, size: str, saved: str
) -> None:
    check_installed(script)
    name = size.partition(" = ")[0]
    text = (EXAMPLES / script).read_text()
    (tmp_path / script).write_text(re.sub(f"^{name} = .*$", size, text, flags=re.MULTILINE))
    line = [str(tmp_path / script), str(tmp_path / "state")]
    job = cluster(flags=("--nnodes=1:2", "--max-restarts=0"), script=line)
    job.start("a")
    wait_for(lambda: [*tmp_path.glob(saved)], 60, "a save")
    job.start("b")
    wait_for(lambda: "this node runs rank" in job.agents["b"].output, 60, "a round of two")
    assert "rank 0: left as it was asked to" in job.agents["a"].output


@pytest.mark.full
def test_ddp_and_fsdp2_end_with_the_same_weights_and_resume(tmp_path: Path) -> None:
    found = set()
    for script, first in itertools.product(("plain_ddp.py", "fsdp2.py"), (0, 100)):
        done = agent(*TWO, str(EXAMPLES / script), str(tmp_path / script))
        assert done.returncode == 0, done.stderr
        line = rf"step 100, begun after step {first}, weights (v2:[0-9a-f]{{64}})\n"
        ended = re.fullmatch(line, done.stdout)
        assert ended is not None, done.stdout
        found.add(ended[1])
    assert len(found) == 1


@pytest.mark.full
def test_the_lightning_example_resumes_from_its_last_checkpoint(tmp_path: Path) -> None:
    check_installed("lightning_ddp.py")
    line = [*TWO, str(EXAMPLES / "lightning_ddp.py"), str(tmp_path / "state")]
    for resumes in (False, True):
        done = agent(*line)
        assert done.stdout.count("step 64\n") == 2, done.stderr
        assert ("Restoring states" in done.stderr) is resumes


@pytest.mark.full
def test_the_trainer_of_the_example_saves_its_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    script = str(EXAMPLES / "trainer_hf.py")
    done = agent(
        *TWO, "-m", "zero_deepspeed.as_deepspeed", script, str(tmp_path / "out"),
        env=environment() | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "final" / "model.safetensors").exists()


def test_the_job_file_of_the_examples_says_what_it_would_start() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "zero_orchestrator", "run", "examples/job.yaml",
         "--on=local", "--agents=2", "--dry-run"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "PET_NNODES=1:4" in done.stdout
    assert "examples/minimal.py runs/minimal/checkpoints" in done.stdout
