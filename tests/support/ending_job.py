"""A job that ends with a save: python ending_job.py ENGINE DIRECTORY [ASYNC] [CLOSES].

Three steps, then the save. At each moment of the end the job waits for a file of the test's in
DIRECTORY, `trained`, `written`, `assembled` and `saved`, and says so by `at-<name>-<rank>`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import zero_checkpoint
import zero_deepspeed
import zero_torch
from tests.support.inside import persistence_of
from zero_checkpoint.files.direct import DirectDisk

ENGINE, DIRECTORY, OPTIONS = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
ASYNC, CLOSES = "ASYNC" in OPTIONS, "CLOSES" in OPTIONS
ROOT = DIRECTORY / "checkpoints"
CONFIG = {"checkpoint": {"async": ASYNC}}
STEPS = 3


def gate(name: str) -> None:
    (DIRECTORY / f"at-{name}-{os.environ['RANK']}").touch()
    while not (DIRECTORY / name).exists():
        time.sleep(0.01)


class Gated(DirectDisk):
    """Waits when this rank's vote is due, and on rank 0 before the fenced commit."""

    def sync(self, file: BinaryIO) -> None:
        super().sync(file)
        name = Path(file.name).name
        if name.endswith(".safetensors") or name.startswith("MANIFEST.json"):
            gate("written" if name.endswith(".safetensors") else "assembled")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))


DATA = torch.arange(4.0 * 6).view(6, 4)


def by_engine() -> tuple[Callable[[], object], Callable[[], object]]:
    settings = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 1},
        **CONFIG,
    }
    engine, *_ = zero_deepspeed.initialize(model=model(), config=settings)
    engine.load_checkpoint(ROOT)
    while engine.global_steps < STEPS:
        engine.backward(engine(DATA[:2]).sum())
        engine.step()
    persistence_of(engine).saver.disk = Gated()
    return lambda: engine.save_checkpoint(ROOT), engine.destroy


def by_protect(alone: bool) -> tuple[Callable[[], object], Callable[[], object]]:
    dist.init_process_group("gloo")
    wrapped = DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(wrapped.parameters())
    loader = None if alone else DataLoader(TensorDataset(DATA), batch_size=1)
    more = {} if alone else {"microbatches": 2}
    run = zero_torch.protect(wrapped, optimizer, loader, config=CONFIG, **more)
    run.load(ROOT)
    persistence_of(run).saver.disk = Gated()

    def step(batch: Tensor) -> None:
        wrapped(batch).sum().backward()
        optimizer.step()

    if alone:
        for _ in range(run.global_step, STEPS):
            step(DATA[:2])
    else:
        for (batch,) in run.loader:
            run.backward(wrapped(batch).sum())
            run.step()
    return lambda: run.save(ROOT), run.close


def by_checkpoint() -> tuple[Callable[[], object], Callable[[], object]]:
    dist.init_process_group("gloo")
    state = {"w": torch.arange(8.0)}
    return lambda: zero_checkpoint.save(ROOT, state, step=STEPS), lambda: None


def main() -> None:
    torch.set_num_threads(1)
    save, close = {
        "engine": by_engine,
        "protect": lambda: by_protect(alone=False),
        "checkpoints": lambda: by_protect(alone=True),
        "zero_checkpoint": by_checkpoint,
    }[ENGINE]()
    gate("trained")
    print("returned", save(), flush=True)
    if CLOSES:
        close()
    gate("saved")


if __name__ == "__main__":
    main()
