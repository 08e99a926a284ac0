"""Two engines whose losses meet, as in a GAN: one's backward goes through the other's model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zero_engine
from tests.support.world import WorldPool
from zero_engine.engine import Engine
from zero_engine.errors import EngineError

REAL = torch.arange(12.0).view(3, 4) / 12
NOISE = REAL.flip(0)


def make(stage: int, seed: int, shape: tuple[int, int]) -> Engine:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(shape[0], 8), nn.Tanh(), nn.Linear(8, shape[1]))
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 3,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
    }
    engine, *_ = zero_engine.initialize(model=model, config=settings)
    return engine


def play(stage: int, frozen: bool) -> tuple[str, str]:
    """Three rounds of discriminator and generator; the models are called by themselves, too."""
    generator, judge = make(stage, 0, (4, 4)), make(stage, 1, (4, 1))
    for _ in range(3):
        fake = generator.module(NOISE)
        judge.backward(judge(REAL).square().mean() + (judge.module(fake.detach()) - 1).abs().mean())
        judge.step()
        judge.module.requires_grad_(not frozen)
        generator.backward(judge(generator(NOISE)).square().mean())
        judge.module.requires_grad_(True)
        generator.step()
    return generator.weight_hash(), judge.weight_hash()


def test_a_gan_trains_to_the_same_bits_at_every_stage(worlds: WorldPool) -> None:
    first, *others = (worlds.run(2, play, stage, True)[0] for stage in range(4))
    assert others == [first] * 3


def refused() -> str:
    with pytest.raises(EngineError) as refusal:
        play(1, frozen=False)
    return str(refusal.value)


def test_a_backward_through_another_engine_s_trained_model_names_the_remedy(
    worlds: WorldPool,
) -> None:
    (said,) = worlds.run(1, refused)
    assert (
        "as a GAN's generator through its discriminator, call model.requires_grad_(False)" in said
    )
