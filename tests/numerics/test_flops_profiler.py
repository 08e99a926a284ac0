"""`flops_profiler`: the operations of one step, counted without touching its result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_deepspeed
from tests.support.world import WorldPool
from zero_engine.config.schema import FlopsProfiler
from zero_engine.observe.flops_profiler import Profile

ROWS, WIDTH, LAYERS = 4, 32, 2
FORWARD = 2 * ROWS * WIDTH * WIDTH * LAYERS
BACKWARD = 2 * FORWARD - 2 * ROWS * WIDTH * WIDTH
"""Twice as much, but nobody wants the gradient of the input."""


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def hash_after_three_steps(stage: int, output: str | None, plain: bool = False) -> str:
    return after_three_steps(stage, output, plain).weight_hash()


def after_three_steps(
    stage: int, output: str | None, plain: bool = False
) -> zero_deepspeed.DeepSpeedEngine:
    engine, *_ = zero_deepspeed.initialize(
        model=Stack(),
        config={
            "train_micro_batch_size_per_gpu": ROWS,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "flops_profiler": {"enabled": output is not None, "output_file": output},
        },
    )
    for step in range(3):
        loss = engine(torch.full((ROWS, WIDTH), 0.1 * (step + 1)))
        if plain:
            engine.scale(loss).backward()
        else:
            engine.backward(loss)
        engine.step()
    return engine


@pytest.mark.parametrize("there", [True, False])
def test_a_file_that_cannot_be_written_ends_no_run(
    worlds: WorldPool, tmp_path: Path, there: bool
) -> None:
    if not there:
        (tmp_path / "below").write_text("a file in the place of the directory")
    (hashed,) = worlds.run(1, hash_after_three_steps, 0, str(tmp_path / "below" / "profile"))
    assert [hashed] == worlds.run(1, hash_after_three_steps, 0, None)
    assert (tmp_path / "below" / "profile").exists() is there


@pytest.mark.parametrize("plain", [False, True], ids=["the engine's backward", "the script's"])
def test_the_second_step_is_counted_and_nothing_is_changed(
    worlds: WorldPool, tmp_path: Path, plain: bool
) -> None:
    for stage in (1, 3):
        output = tmp_path / f"stage-{stage}.txt"
        uncounted = worlds.run(2, hash_after_three_steps, stage, None)
        assert worlds.run(2, hash_after_three_steps, stage, str(output), plain) == uncounted
        head, *modules = output.read_text().splitlines()
        assert head.startswith(f"step 2 on rank 0: forward {FORWARD / 1e9:.3f} GFLOP in ")
        assert f"backward {BACKWARD / 1e9:.3f} GFLOP in " in head
        assert modules[0] == f"  Stack: {(FORWARD + BACKWARD) / 1e9:.3f} GFLOP"


def shown(stage: int, output: str) -> tuple[bool, Any]:
    profiler = after_three_steps(stage, output).flops_profiler
    numbers = (profiler.flops, profiler.macs, profiler.params)
    return hasattr(after_three_steps(stage, None), "flops_profiler"), numbers


@pytest.mark.parametrize("stage", [0, 3])
def test_a_script_reads_the_counts_of_the_forward_as_from_deepspeeds_engine(
    worlds: WorldPool, tmp_path: Path, stage: int
) -> None:
    parameters = LAYERS * (WIDTH * WIDTH + WIDTH)
    counts = (FORWARD, FORWARD // 2, parameters)
    assert worlds.run(1, shown, stage, str(tmp_path / "counts")) == [(False, counts)]


def test_what_is_not_the_profiled_step_is_not_counted() -> None:
    profile = Profile(FlopsProfiler(enabled=True, profile_step=3), 0, torch.device("cpu"))
    for done in range(6):
        with profile.measure("forward", done):
            torch.ones(8, 8) @ torch.ones(8, 8)
    assert profile._flops == {"forward": 2 * 8**3}
