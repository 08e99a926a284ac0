"""transformers' Trainer and accelerate, as they are, on our engine under DeepSpeed's name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.cluster import TOGETHER, Cluster, environment
from tests.support.fresh import run_forked
from tests.support.waiting import wait_for
from zero_contract.exit_codes import AgentExit

pytestmark = pytest.mark.processes

SCRIPTS = Path(__file__).resolve().parents[1] / "data" / "scripts"
AGENT = ["-m", "zero_agent", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
AUTO = "auto"


def config(directory: Path, stage: int, **more: Any) -> Path:
    """As fine-tuning tools ship them: what can be is left to the library."""
    keys = {
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": AUTO,
        "gradient_clipping": AUTO,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "reduce_bucket_size": AUTO,
            "stage3_prefetch_bucket_size": AUTO,
            "stage3_param_persistence_threshold": AUTO,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        **more,
    }
    path = directory / f"stage{stage}.json"
    path.write_text(json.dumps(keys))
    return path


def start(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A script under an agent of two workers, to its end."""
    command = [*AGENT, "-m", "zero_deepspeed.as_deepspeed", str(SCRIPTS / script)]
    return subprocess.run(
        [sys.executable, *command, *map(str, arguments)],
        env=environment() | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def run(script: str, *arguments: object) -> Any:
    """What rank 0 printed last, a line of JSON."""
    done = start(script, *arguments)
    assert done.returncode == 0, done.stderr
    return last_told(done.stdout)


def last_told(output: str) -> Any:
    """The last line of JSON in it."""
    return json.loads([line for line in output.splitlines() if line.startswith('{"')][-1])


def fine_tune(directory: Path, stage: int, *arguments: object) -> tuple[Any, dict[str, Tensor]]:
    """What a run of the Trainer told, and the model that it has saved."""
    directory.mkdir(exist_ok=True)
    flags = ("--deepspeed", config(directory, stage), "--output_dir", directory / "out")
    told = run("trainer.py", *flags, *arguments)
    return told, load_file(directory / "out" / "final" / "model.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, dict[str, Tensor]]:
    directory = tmp_path_factory.mktemp("whole")
    return directory / "out", *fine_tune(directory, 2)


@pytest.mark.full
def test_the_trainer_resumes_at_another_stage_to_the_same_bits(
    tmp_path: Path, whole: tuple[Path, Any, dict[str, Tensor]]
) -> None:
    output, told, weights = whole
    assert told["engine"] == "DeepSpeedEngine"
    assert list(told["steps"]) == [str(step) for step in range(1, 7)]  # two of three micro-steps,
    assert told["steps"]["1"][0] > told["steps"]["6"][0]  # and a short one, in each epoch
    flags = ("--resume_from_checkpoint", output / "checkpoint-3")
    assert_same(fine_tune(tmp_path, 3, *flags), (told, weights))


def test_a_trainer_that_never_resumes_goes_on_when_a_rank_is_killed(tmp_path: Path) -> None:
    flags = ("--deepspeed", config(tmp_path, 1), "--output_dir", tmp_path / "out")
    done = start("trainer.py", *flags, "--never_resume", "--kill_at_step=5")
    assert done.returncode == 0, done.stderr
    assert f"training resumes from {tmp_path}/out/checkpoint-3\n" in done.stderr
    assert list(last_told(done.stdout)["steps"]) == [str(step) for step in range(1, 7)]


@pytest.mark.full
@pytest.mark.parametrize("end", [("--max_steps=4",), ("--stop_at_step=2",)])
def test_a_trainer_that_is_started_again_behind_its_end_trains_no_further(
    tmp_path: Path, end: tuple[str, ...]
) -> None:
    """Both within an epoch: the second start has nothing left to do but what is behind train()."""
    told, _ = fine_tune(tmp_path, 1, *end, "--never_resume", "--die_behind")
    assert max(map(int, told["steps"])) == int(end[0].partition("=")[2])


@pytest.mark.full
def test_a_killed_rank_costs_the_trainer_steps_and_no_bit(
    tmp_path: Path, whole: tuple[Path, Any, dict[str, Tensor]]
) -> None:
    assert_same(fine_tune(tmp_path, 1, "--never_resume", "--kill_at_step=5"), whole[1:])


@pytest.mark.full
def test_a_trainer_resumes_within_a_later_epoch_of_a_stream_to_the_same_bits(
    tmp_path: Path,
) -> None:
    """An epoch has two steps; the checkpoint of step 3 is one step into the second epoch."""
    whole = fine_tune(tmp_path / "whole", 1, "--stream=24")
    assert list(whole[0]["steps"]) == [str(step) for step in range(1, 7)]
    flags = ("--stream=24", "--never_resume", "--kill_at_step=5")
    assert_same(fine_tune(tmp_path / "killed", 1, *flags), whole)


@pytest.mark.full
def test_a_trainer_whose_checkpoints_are_weights_alone_ends_with_a_sentence(tmp_path: Path) -> None:
    flags = ("--deepspeed", config(tmp_path, 2), "--output_dir", tmp_path / "out")
    done = start("trainer.py", *flags, "--save_only_model", "--never_resume", "--kill_at_step=5")
    assert done.returncode == AgentExit.JOB_FAILED
    why = f"training cannot resume from {tmp_path}/out/checkpoint-3: the checkpoints there hold"
    assert f"{why} weights alone (save_only_model)" in done.stderr
    assert "Set save_only_model to False" in done.stderr
    assert "'epoch': '1.429'}" in done.stdout
    assert done.stdout.count("'epoch': '0.4286'}") == 1  # it did not begin again


@pytest.mark.full
def test_a_join_costs_the_trainer_no_step_and_the_batch_stays(
    tmp_path: Path, cluster: Callable[..., Cluster], whole: tuple[Path, Any, dict[str, Tensor]]
) -> None:
    output = tmp_path / "out"
    flags = ("--deepspeed", config(tmp_path, 2), "--output_dir", output, "--never_resume")
    of_one_rank = ("--accumulation=6", "--wait_in_step=2", "--kill_at_step=5")
    script = ["-m", "zero_deepspeed.as_deepspeed", SCRIPTS / "trainer.py", *flags, *of_one_rank]
    job = cluster(flags=("--nnodes=1:2", "--max-restarts=1"), script=list(map(str, script)))
    job.start("a", HF_HUB_OFFLINE="1")
    wait_for(lambda: job.events("worker"), 60, "the first worker")
    job.start("b", HF_HUB_OFFLINE="1")
    wait_for(lambda: job.events("leave"), 90, "the workers are asked to leave")
    (output / "go").touch()
    job.wait_for_end()
    said = job.output
    assert f"training resumes from {output}/checkpoint-2\n" in said  # saved for the join alone
    assert "a step keeps its 12 samples on 2 ranks, as on 1 at first" in said
    assert f"training resumes from {output}/checkpoint-3\n" in said  # after the kill
    assert said.count("'epoch': '0.8571'}") == 1  # no step was done twice for the join
    told, (_, expected, weights) = last_told(said), whole
    # What the Trainer logs as the loss it adds up itself, on each rank; norm and rate are exact.
    for step, (loss, *exact) in told["steps"].items():
        assert loss == pytest.approx(expected["steps"][step][0])
        assert exact == expected["steps"][step][1:]
    assert_same((None, load_file(output / "final" / "model.safetensors")), (None, weights))


def assert_same(ours: tuple[Any, dict[str, Tensor]], theirs: tuple[Any, dict[str, Tensor]]) -> None:
    assert ours[0] == theirs[0]
    assert ours[1].keys() == theirs[1].keys()
    assert all(torch.equal(value, theirs[1][name]) for name, value in ours[1].items())


@pytest.mark.full
def test_accelerate_goes_on_from_its_saved_state_at_stage_3(tmp_path: Path) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": AUTO, "weight_decay": AUTO}}
    rates = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    schedule = {"type": "WarmupDecayLR", "params": dict.fromkeys(rates, AUTO)}
    offload = {"device": "cpu", "pin_memory": True}
    settings = config(tmp_path, 3, optimizer=optimizer, scheduler=schedule, bf16={"enabled": AUTO})
    keys = json.loads(settings.read_text())
    keys["zero_optimization"]["offload_optimizer"] = offload
    settings.write_text(json.dumps(keys))
    told = run("accelerated.py", "--config", settings, "--output_dir", tmp_path)
    assert told["first"] == told["again"]
    assert told["same"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ((), "round 2 of the job begins to train without its checkpoint: one of step 2 is"),
        (("--load",), "a step took 8 samples when the checkpoint was made, and takes 4 now"),
    ],
)
def test_a_loop_of_accelerate_does_not_begin_again_or_change_its_batch_in_silence(
    tmp_path: Path, cluster: Callable[..., Cluster], flags: tuple[str, ...], why: str
) -> None:
    loop = (SCRIPTS / "accelerated_loop.py", "--output_dir", tmp_path, *flags)
    script = ["-m", "zero_deepspeed.as_deepspeed", *map(str, loop)]
    job = cluster(flags=("--nnodes=1:2", "--max-restarts=1", TOGETHER), script=script)
    job.start("a", "b")
    wait_for((tmp_path / "saved").is_dir, 90, "a saved state")
    job.agents["b"].kill_node()
    assert job.agents["a"].wait() == AgentExit.JOB_FAILED
    assert why in job.agents["a"].output


@pytest.mark.full
@pytest.mark.parametrize("how", ["script", "module"])
def test_accelerate_launch_starts_workers_that_find_the_engine(how: str) -> None:
    launcher = ["-m", "zero_deepspeed.as_deepspeed", "-m", "accelerate.commands.launch"]
    flags = ["--use_deepspeed", "--num_processes=2", "--zero_stage=3", "--main_process_port=0"]
    name = "accelerate_launched"
    script = [f"{name}.py"] if how == "script" else ["-m", name]
    done = subprocess.run(
        [sys.executable, *launcher, *flags, *script, "--an", "argument"],
        cwd=SCRIPTS,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()) == (
        0,
        [
            "trained by zero_deepspeed.engine at stage 3",
            "on 2 ranks: 2 steps ['--an', 'argument']",
        ],
    ), done.stderr


@pytest.mark.parametrize("flag", ["--no_python", "--num_machines=2"])
@pytest.mark.corners(flag=["--num_machines=2"])
def test_accelerate_launch_refuses_what_would_find_another_engine(flag: str) -> None:
    launcher = ("zero_deepspeed.as_deepspeed", "-m", "accelerate.commands.launch")
    flags = ("--use_deepspeed", "--num_processes=2", "--main_process_port=0", flag, "train.py")
    done = run_forked(*launcher, *flags)
    assert done.returncode != 0
    assert "accelerate launch" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
