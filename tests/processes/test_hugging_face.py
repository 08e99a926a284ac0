"""transformers' Trainer and accelerate, as they are, on our engine under DeepSpeed's name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.cluster import environment

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


def run(script: str, *arguments: object) -> Any:
    """What rank 0 printed last, a line of JSON."""
    command = [*AGENT, "-m", "zero_engine.as_deepspeed", str(SCRIPTS / script)]
    done = subprocess.run(
        [sys.executable, *command, *map(str, arguments)],
        env=environment() | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


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
    assert told["engine"] == "Engine"
    assert list(told["steps"]) == [str(step) for step in range(1, 7)]  # two of three micro-steps,
    assert told["steps"]["1"][0] > told["steps"]["6"][0]  # and a short one, in each epoch
    flags = ("--resume_from_checkpoint", output / "checkpoint-3")
    assert_same(fine_tune(tmp_path, 3, *flags), (told, weights))


def test_a_killed_rank_costs_the_trainer_steps_and_no_bit(
    tmp_path: Path, whole: tuple[Path, Any, dict[str, Tensor]]
) -> None:
    assert_same(fine_tune(tmp_path, 1, "--kill_at_step=5"), whole[1:])


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
