"""`python -m zero_engine FILE`, as a user types it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.fresh import run_forked
from zero_contract.errors import ConfigError
from zero_engine.__main__ import main
from zero_engine.config import OptimizerConfig, SchedulerConfig, load_config
from zero_engine.observe.explain import explain
from zero_engine.optim.lr_schedules import make_schedule
from zero_engine.optim.optimizers import make_optimizer


def lines(data: dict[str, Any], parameters: int = 10**9) -> list[str]:
    return "\n".join(explain(load_config(data), data, parameters)).splitlines()


def test_resolved_values_say_which_are_from_the_file() -> None:
    told = lines({"train_batch_size": 32.0, "zero_optimization": True, "gradient_clipping": "auto"})
    assert "  * train_batch_size = 32" in told
    assert "  * gradient_clipping = 1.0" in told
    assert "    fp16.enabled = false" in told
    assert not any("loss_scale_window" in line for line in told)  # of what is off, nothing
    assert "  * zero_optimization.stage = 1" in told


def test_what_is_printed_can_be_written_into_the_file() -> None:
    data = {"bfloat16": {"enabled": True}, "checkpoint": {"async": True}}
    told = lines(data)
    assert "  * bf16.enabled = true" in told
    assert "  * checkpoint.async = true" in told
    assert "    checkpoint.every_steps = null" in told
    assert not any("asynchronous" in line for line in told)


def test_keys_without_effect_come_with_the_reason() -> None:
    zero = {"stage": 3, "contiguous_gradients": True}
    told = lines({"zero_optimization": zero, "data_types": {"grad_accum_dtype": "fp32"}})
    assert "  data_types.grad_accum_dtype: gradients are summed in fp32" in told
    assert "  zero_optimization.contiguous_gradients: always so here" in told


def test_the_memory_of_a_rank_is_told_for_1_to_64_ranks() -> None:
    data = {
        "train_batch_size": 48,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW"},
    }
    rows = [line.split() for line in lines(data, 2**30) if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["1", "2", "4", "8", "16", "32", "64"]
    # weights 2, then 4 master + 8 moments + 4 gradient sums bytes per parameter over the ranks,
    # and the pending pieces of these sums: three on one rank, none on eight
    assert rows[0][1:] == ["2.00", "4.00", "8.00", "16.00", "30.00", "0.00", "0.00", "48,", "100%"]
    assert rows[3][1:] == ["2.00", "0.50", "1.00", "0.50", "4.00", "0.00", "0.00", "6,", "100%"]
    assert rows[5][8:] == ["2,", "75%"]


def test_what_is_offloaded_is_in_the_columns_of_host_and_disk() -> None:
    nvme = {"device": "nvme", "nvme_path": "/nvme"}
    zero = {"stage": 3, "offload_optimizer": nvme, "offload_param": {"device": "cpu"}}
    data = {"zero_optimization": zero, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
    rows = [line.split() for line in lines(data, 2**30) if line.strip()[:1].isdigit()]
    # Gradient sums stay. On the host: weights in bf16, and three sub-groups of 12 bytes for each of
    # 16 Mi elements, or of a shard of the largest module, a 32nd of all. On the disk: masters
    # and moments.
    assert rows[0][1:8] == ["0.00", "0.00", "0.00", "4.00", "4.00", "2.56", "12.00"]
    assert rows[2][1:8] == ["0.00", "0.00", "0.00", "1.00", "1.00", "0.78", "3.00"]


THREE = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}


@pytest.mark.parametrize(
    ("data", "warning"),
    [
        ({}, "the config gives no batch size"),
        ({"train_batch_size": 8}, "the batch depends on the number of ranks of the first start"),
        ({**THREE, "gradient_accumulation_steps": 2}, "the job can begin on 2 ranks only"),
        ({**THREE, "gradient_accumulation_steps": 4}, "the job can begin on 1 rank only"),
        ({**THREE, "gradient_accumulation_steps": 3}, "the job can begin on no number of ranks"),
        ({"optimizer": {"type": "Mine"}}, "optimizer Mine: its memory is not known"),
        ({"optimizer": {"type": "Adafactor"}}, "each parameter is stepped whole, by the rank that"),
        ({"optimizer": {"type": "Muon"}}, "optimizer Muon: counted as for matrices; embeddings"),
        ({"gradient_clipping": 0}, "gradients are not clipped"),
        (
            {"managed_gradient_accumulation": False},
            "a step ends where the script calls step(), so the global batch follows from",
        ),
        ({"fp16": {"enabled": True, "loss_scale": 8}}, "the loss scale is fixed at 8"),
        ({"bf16": {"enabled": True}}, "stage 0 keeps all master weights and moments"),
    ],
)
def test_what_may_surprise_is_a_warning(data: dict[str, Any], warning: str) -> None:
    told = lines(data)
    warnings = told[told.index("Warnings:") :]
    assert any(warning in line for line in warnings)


def test_what_two_nodes_would_choose_is_told_with_the_reasons() -> None:
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True}
    data = {"bf16": bf16, "zero_optimization": {"stage": 1}, "elastic": {"accumulate": "node"}}
    told = list(explain(load_config(data), data, 10**9, node_ranks=8))
    at = told.index("\nOn two nodes of 8 GPUs:")
    assert told[at + 1 : at + 5] == [
        "  precision: computes in bf16, master weights rest in bf16, the optimizer's state in "
        "fp32; gradients are summed in fp32",
        "  stage 1: the optimizer's state divided among 16 ranks",
        "  sums: in order, by blocks of 8 micro-batches",
        "  nodes: gradients are added inside each node before they travel to others (ranks of the "
        "nodes: 8, 8)",
    ]


def test_a_world_divides_no_batch_that_is_not_given() -> None:
    row = next(line for line in lines({}) if line.startswith("      1 "))
    assert row.endswith("   no batch size is given")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"train_batch": 3}', "train_batch: unknown key; did you mean 'train_batch_size'?"),
        (
            '{"seed": ',
            "config 'config.json' is not JSON: line 1: it ends here, and a bracket is still open",
        ),
        ("[1]", "config 'config.json' is a JSON list; it must be an object"),
        ("\n", "config 'config.json' is empty; write {} for a config without keys"),
        (None, "config 'config.json' cannot be read: No such file or directory"),
    ],
)
def test_a_bad_file_is_one_line_and_exit_code_2(
    text: str | None,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("config.json").write_text(text)
    assert main(["config.json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"python -m zero_engine: {message}\n"


BATCH = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1}


@pytest.mark.parametrize(
    "section",
    [
        {"optimizer": {"type": "Adan"}},
        {"optimizer": {"type": "AdamW", "params": {"learning_rate": 1e-4}}},
        {"optimizer": {"type": "AdamW", "params": {"lr": "1e-4 "}}},
        {"optimizer": {"type": "AdamW", "params": {"lr": "fast"}}},
        {"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}},
        {"optimizer": {"type": "Lion", "params": {"lr": -1}}},
        {"scheduler": {"type": "Warmup"}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 1}}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [1e-3, 1e-4, 1e-5]}}},
        {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10}}},
    ],
    ids=str,
)
def test_the_command_refuses_what_initialize_refuses_in_the_same_words(
    section: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config({**BATCH, **section})
    model = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
    groups = [{"params": list(layer.parameters())} for layer in model]
    said = ""
    try:
        given = config.optimizer or OptimizerConfig(type="SGD")
        optimizer = make_optimizer(None, given, groups, model)
        assert optimizer is not None
        make_schedule(config.scheduler or SchedulerConfig(), optimizer)
    except ConfigError as error:
        said = f"python -m zero_engine: {error}\n"
    assert main([json.dumps({**BATCH, **section})]) == (2 if said else 0)
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "the config gives no batch size"),
        ({**THREE, "gradient_accumulation_steps": 3}, "train_batch_size is not equal to"),
        ({"train_batch_size": 10, "gradient_accumulation_steps": 4}, "is not a multiple of"),
        (
            {
                **BATCH,
                "optimizer": {"type": "Adafactor"},
                "zero_optimization": {"stage": 1},
                "bf16": {
                    "enabled": True,
                    "bf16_master_weights_and_grads": True,
                    "bf16_optimizer_states": True,
                },
            },
            "bf16.bf16_optimizer_states: Adafactor is given whole parameters",
        ),
    ],
)
def test_what_no_job_could_begin_with_is_no_good(
    data: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([json.dumps(data)]) == 2
    assert message in capsys.readouterr().err


def test_what_the_trainer_fills_in_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    auto = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}
    optimizer = {"type": "AdamW", "params": {"lr": "auto"}}
    data = {"train_batch_size": "auto", "optimizer": optimizer, "scheduler": auto}
    assert main([json.dumps(data)]) == 0
    assert "total_num_steps has none: the Hugging Face Trainer fills" in capsys.readouterr().out


def test_it_runs_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    text = '{"train_batch_size": 8, // in all\n"optimizer": {"type": "SGD"},}'
    path.write_text(text)
    done = run_forked("zero_engine", path, "--parameters", "7e9")
    assert done.returncode == 0, done.stderr
    assert "Per rank, 7,000,000,000 trained parameters, stage 0:" in done.stdout
    assert done.stderr == (
        f"python -m zero_engine: config {str(path)!r} is read as DeepSpeed reads it, with "
        "comments (line 1), a comma after the last entry (line 2)\n"
    )


@pytest.mark.full
def test_a_closed_pipe_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "zero_engine", '{"train_batch_size": 8}']
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=120, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")
