"""Checkpoints that a script saves in the middle of a step: those of the step before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zero_deepspeed
from tests.support.world import WorldPool
from zero_deepspeed.engine import Engine

SAVED_AT = 2
PLACES = ("forward", "backward", "micro-step", "last forward", "last backward")


class Counts(nn.Module):
    """Divides by what its forwards have seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.abs().mean().detach()
        out: Tensor = self.norm(self.layer(x)) / self.seen
        return (out - 1).square().mean()


def make(stage: int) -> Engine:
    torch.manual_seed(0)
    data = [torch.randn(6) for _ in range(32)]
    settings = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    engine, *_ = zero_deepspeed.initialize(model=Counts(), config=settings, training_data=data)
    return engine


def train(engine: Engine, place: str = "", directory: str = "") -> list[str]:
    """Weights and buffers in the end; on the way a checkpoint is saved somewhere in a step."""

    def pass_by(*names: str) -> None:
        if engine.global_steps == SAVED_AT and place in names:
            engine.save_checkpoint(directory)

    for batch in engine.training_dataloader:
        ends = engine.is_gradient_accumulation_boundary()
        loss = engine(batch)
        pass_by("last forward" if ends else "forward")
        engine.backward(loss)
        pass_by("last backward" if ends else "backward")
        engine.step()
        pass_by("" if ends else "micro-step")
    return [engine.weight_hash(), *(str(buffer) for buffer in engine.module.buffers())]


def save_at(stage: int, place: str, directory: str) -> list[str]:
    return train(make(stage), place, directory)


def resume(stage: int, directory: str) -> list[str]:
    engine = make(stage)
    engine(torch.ones(2, 6))  # of no micro-step
    assert engine.load_checkpoint(directory)[0] is not None
    assert engine.global_steps == SAVED_AT
    return train(engine)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.corners(stage=[3])
def test_a_run_resumes_from_it_with_the_bits_of_one_that_went_on(
    worlds: WorldPool, tmp_path: Path, place: str, stage: int
) -> None:
    whole = worlds.run(1, save_at, stage, place, str(tmp_path))
    assert worlds.run(2, resume, stage, str(tmp_path)) == whole * 2
