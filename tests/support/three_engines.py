"""A script with three engines, each with data and a directory of its own.

python three_engines.py DIRECTORY STEPS: it goes no further than the number in DIRECTORY/gate.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import zero_deepspeed

NAMES = ("actor", "critic", "judge")


class Points(Dataset[Tensor]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), index / 48)


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, batch: Tensor) -> Tensor:
        return self.layers(batch).square().mean()


def make(number: int) -> zero_deepspeed.DeepSpeedEngine:
    torch.manual_seed(number)
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": number},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "checkpoint": {"ram": {}},
    }
    model = Model(8 + number)
    engine, *_ = zero_deepspeed.initialize(model=model, config=config, training_data=Points())
    return engine


def train(engine: zero_deepspeed.DeepSpeedEngine, steps: int) -> None:
    while engine.global_steps < steps:
        for batch in engine.training_dataloader:
            engine.backward(engine(batch))
            engine.step()
            if engine.global_steps == steps:
                break


def train_all(directory: Path, steps: int) -> list[str]:
    """The hashes at the end. An engine that is behind the others takes its own steps."""
    engines = [make(number) for number in range(len(NAMES))]
    for engine, name in zip(engines, NAMES, strict=True):
        engine.load_checkpoint(directory / name)
    for step in range(1, steps + 1):
        while step > int((directory / "gate").read_text()):
            time.sleep(0.02)
        for engine in engines:
            train(engine, step)
    for engine, name in zip(engines, NAMES, strict=True):
        assert engine.save_checkpoint(directory / name)
    return [engine.weight_hash() for engine in engines]


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    print("hashes:", *train_all(Path(sys.argv[1]), int(sys.argv[2])), flush=True)
