"""A training whose ranks are as slow as a test says.

python slow_ranks.py DIRECTORY [WIDTH]: trains until there is a file DIRECTORY/enough. Each step of
three ranks takes `STEP_S`, and on rank R so many seconds longer as the file DIRECTORY/slow-R says;
if it says "stuck", for ever.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import zero_engine

STEP_S = 0.1
STEPS = 5
"""After so many steps there is a file DIRECTORY/stepped."""
MANY_STEPS = 50
"""After each so many steps there is a file DIRECTORY/stepped-STEP."""


def compute(directory: Path, rank: int) -> None:
    """Take as long as the test says."""
    slow = directory / f"slow-{rank}"
    text = slow.read_text() if slow.exists() else "0"
    if text == "stuck":
        stick()
    time.sleep(STEP_S + float(text))


def stick() -> None:
    """Never return."""
    time.sleep(3600)


def main(directory: Path, width: int = 4) -> None:
    torch.manual_seed(0)
    config = {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 1},
    }
    engine = zero_engine.initialize(
        nn.Linear(width, width),
        config=config,
        training_data=TensorDataset(torch.ones(1200, width)),
    )
    engine.load_checkpoint(directory / "checkpoints")
    while not (directory / "enough").exists():
        for (batch,) in engine.training_dataloader:
            engine.backward(engine(batch).square().mean())
            compute(directory, engine.global_rank)
            engine.step()
            if engine.global_steps == STEPS:
                (directory / "stepped").touch()
            if engine.global_steps % MANY_STEPS == 0:
                (directory / f"stepped-{engine.global_steps}").touch()
            if engine.checkpoint_due(every_steps=100):
                engine.save_checkpoint(directory / "checkpoints")
                if (directory / "enough").exists():
                    break


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
