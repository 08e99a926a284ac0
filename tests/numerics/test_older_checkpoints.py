"""Checkpoints of earlier versions of this project load to the same weights, and go on in their
order of sums."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_deepspeed
from tests.support.world import WorldPool
from zero_checkpoint import weight_hash
from zero_engine.sharding.weights import whole_weights

OLD = Path(__file__).parents[1] / "data" / "checkpoints" / "before_the_libraries"
"""Written when there was one package, `zero_engine`: stage 3, bf16, world size 2, three steps."""
HASH = "6082c802b4b3a82ac45389aeacd0a7e919dfef44a578e66f4dac0997db9b5723"
"""Of version 1, as its manifest has it."""
CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.01},
    },
    "bf16": {"enabled": True},
}


def load(stage: int, root: str) -> tuple[Any, ...]:
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
    model.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
    settings = CONFIG | {"zero_optimization": {"stage": stage}}
    engine, *_ = zero_deepspeed.initialize(model=model, config=settings)
    _, client = engine.load_checkpoint(root)
    rate = engine.lr_scheduler.get_last_lr()
    assert engine._core.zero is not None
    block = engine._core.zero.reduction_block
    weights = weight_hash(whole_weights(engine._core.units), version=1)
    return weights, engine.global_steps, rate, client, model.seen.tolist(), block


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.corners(stage=[0], world=[3])
def test_a_checkpoint_from_before_the_libraries_loads_to_its_hash(
    worlds: WorldPool, tmp_path: Path, stage: int, world: int
) -> None:
    shutil.copytree(OLD, tmp_path / "old")
    client = {"epoch": 0, "note": "before the libraries"}
    expected = (HASH, 3, [0.006826061944859854], client, [0, 1, 2], 1)
    assert worlds.run(world, load, stage, str(tmp_path / "old")) == [expected] * world
