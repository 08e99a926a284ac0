"""The examples do what their first lines say, and are short enough to be read."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cluster import ROOT, TOGETHER, Cluster, agent, environment
from tests.support.waiting import wait_for
from zero_contract.exit_codes import AgentExit

pytestmark = pytest.mark.processes

EXAMPLES = ROOT / "examples"
SHORT = (
    *("minimal.py", "plain_ddp.py", "fsdp2.py", "lightning_ddp.py", "trainer_hf.py"),
    *("accelerate_loop.py", "own_loop.py", "job.yaml"),
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
        ("lightning_ddp.py", "EPOCHS, SAVE_EVERY = 10**6, 100", "state/*/MANIFEST.json"),
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
@pytest.mark.parametrize("sharded", ["ddp", "fsdp2"])
def test_lightning_has_one_hash_at_every_world_size_and_after_a_kill_and_a_join(
    tmp_path: Path, cluster: Callable[..., Cluster], sharded: str
) -> None:
    """World 2, then 1, then 2: a node is killed, and comes back."""
    check_installed("lightning_ddp.py")
    example = EXAMPLES / "lightning_ddp.py"
    alone = agent("--standalone", str(example), str(tmp_path / "alone"), "ddp")
    undisturbed = re.findall(r"^step 100, weights v2:[0-9a-f]{64}$", alone.stdout, re.MULTILINE)
    slow = tmp_path / "slow.py"
    pause = f"        time.sleep(0 if Path({str(tmp_path / 'hurry')!r}).exists() else 0.03)\n"
    its_step = "        return nn.functional"
    slow.write_text(
        "import time\nfrom pathlib import Path\n"
        + example.read_text().replace(its_step, pause + its_step)
    )
    line = [str(slow), str(tmp_path / "state"), sharded]
    job = cluster(flags=("--nnodes=1:2", "--max-restarts=1", TOGETHER), script=line)
    job.start("a", "b")
    wait_for(lambda: [*tmp_path.glob("state/*/MANIFEST.json")], 120, "a save")
    job.agents["b"].kill_node()
    wait_for(lambda: job.events("restore"), 60, "one rank")
    job.start("b")
    wait_for(lambda: len(job.events("restore")) == 2, 90, "two ranks again")
    (tmp_path / "hurry").touch()
    job.wait_for_end()
    found = re.findall(r"^step 100, weights v2:[0-9a-f]{64}$", job.output, re.MULTILINE)
    assert {*found} == {*undisturbed}
    assert len(undisturbed) == 1


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


@pytest.mark.full
def test_a_loop_of_its_own_has_the_same_losses_and_weights_at_every_world_size(
    tmp_path: Path,
) -> None:
    found = set()
    for ranks in (1, 3):
        line = (*TWO[:1], f"--nproc-per-node={ranks}", str(EXAMPLES / "own_loop.py"))
        done = agent(*line, str(tmp_path / f"on{ranks}"))
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        found.add(tuple(dict.fromkeys(lines)))  # every rank prints the last one
        assert lines.count(lines[-1]) == ranks
    assert len(found) == 1
    assert [line.partition(":")[0] for line in lines[:4]] == [f"step {n}0" for n in (1, 2, 3, 4)]


LOOP = EXAMPLES / "accelerate_loop.py"


@pytest.mark.full
def test_a_loop_of_accelerate_has_one_hash_at_every_number_of_ranks_and_when_it_resumes(
    tmp_path: Path,
) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    short = tmp_path / "short.py"  # ends in its second epoch
    short.write_text(
        LOOP.read_text().replace(
            "EPOCHS, SAVE_EVERY, MICROBATCHES = 5", "EPOCHS, SAVE_EVERY, MICROBATCHES = 2"
        )
    )
    assert agent(*TWO, str(short), str(tmp_path / "on3")).returncode == 0
    found = set()
    for ranks, first in ((1, 0), (2, 0), (3, 6)):
        line = (*TWO[:1], f"--nproc-per-node={ranks}", str(LOOP), str(tmp_path / f"on{ranks}"))
        done = agent(*line)
        assert f"step 20 from {first}," in done.stdout, done.stderr
        found.add(tuple(hashes(done.stdout)))
    assert len(found) == len(next(iter(found))) == 1


RECIPE = ROOT / "tests" / "data" / "scripts" / "accelerate_recipe.py"


def looped(directory: Path, ranks: int, *edits: tuple[str, str]) -> tuple[int, str]:
    """The recipe, edited, at this number of ranks; its last step's number and its output."""
    text = RECIPE.read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    script = directory.with_name(f"{directory.name}.py")
    script.write_text(text)
    line = (*TWO[:1], f"--nproc-per-node={ranks}", "-m", "zero_deepspeed.as_deepspeed", str(script))
    done = agent(*line, str(directory))
    return done.returncode, done.stdout + done.stderr


def hashes(output: str) -> list[str]:
    return re.findall(r"^step 20 from \d+, weights (v2:[0-9a-f]{64})$", output, re.MULTILINE)


@pytest.mark.full
def test_a_loop_of_accelerate_with_the_engine_has_one_hash_and_resumes(
    tmp_path: Path,
) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    found = {tuple(hashes(looped(tmp_path / f"on{ranks}", ranks)[1])) for ranks in (1, 2)}
    short = ("MICROBATCHES = 5, 3, 6", "MICROBATCHES = 2, 3, 6")  # to its second step in epoch 1
    assert looped(tmp_path / "resumed", 2, short)[0] == 0
    code, output = looped(tmp_path / "resumed", 3)
    assert (code, "step 20 from 6," in output) == (0, True), output
    found.add(tuple(hashes(output)))
    assert len(found) == len(next(iter(found))) == 1


PREPARED = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"


@pytest.mark.full
@pytest.mark.parametrize(
    ("edit", "ends", "told"),
    [
        (("use_seedable_sampler=True", ""), 0, "accelerate shuffles this DataLoader in another"),
        (
            (PREPARED, f"scheduler, {PREPARED.replace('(model', '(scheduler, model')}"),
            0,
            "a scheduler that accelerate has prepared steps as often in a step as there are ranks",
        ),
        (
            ("deepspeed_plugin=", "cpu=True, deepspeed_plugin="),
            AgentExit.JOB_FAILED,
            "accelerate has dropped the deepspeed_plugin, as Accelerator(cpu=True) does",
        ),
        (
            ("deepspeed_plugin=DeepSpeedPlugin(zero_stage=1),", ""),
            AgentExit.JOB_FAILED,  # it has no weight_hash
            "this Accelerator has no deepspeed_plugin, so as_deepspeed makes no engine for it",
        ),
    ],
)
def test_a_loop_of_accelerate_that_follows_the_number_of_ranks_is_told_why(
    tmp_path: Path, edit: tuple[str, str], ends: int, told: str
) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    code, output = looped(tmp_path / "loop", 2, edit)
    assert (code, told in output) == (ends, True), output


@pytest.mark.full
def test_a_loop_of_accelerate_that_resumes_in_epoch_0_is_told_so(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    assert looped(tmp_path / "loop", 1, ("MICROBATCHES = 5", "MICROBATCHES = 2"))[0] == 0
    code, output = looped(tmp_path / "loop", 1, ("loader.set_epoch(epoch)", "pass"))
    told = "the loaded checkpoint has used 144 samples, more than the 96 of this DataLoader"
    assert (code, told in output) == (0, True), output
