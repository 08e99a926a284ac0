"""A worker of `chaos.py`: trains a small GPT under the engine, under FSDP2, or plainly.

    chaos_worker.py plain|engine|fsdp2 STAGE SEED DIRECTORY CHECKPOINTS

`DIRECTORY/pause` has the seconds that each step takes more. `DIRECTORY/epochs` has the number of
epochs; a training ends only when it is there. It is written when it is still two epochs ahead, so
that all ranks know it in time. Who is rank 0 notes each step as `time step world` in a file of its
process. Under the engine, workers stay in their processes where they can (`elastic.in_place`). A
plain training writes `step hash` of each step into `DIRECTORY/hashes`. All three trainings end with
the same weights.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import zero_deepspeed
import zero_torch

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.stock import LENGTH, VOCABULARY, make

MICRO, MICROBATCHES = 2, 8
SAMPLES = 50 * MICRO * MICROBATCHES + 6
"""51 steps in an epoch, the last one shorter."""
SAVE_EVERY = 20
IN_MEMORY: dict[str, Any] = {"checkpoint": {"ram": {}}}


def end_after(directory: Path, steps: int) -> None:
    """Let a training that has done so many steps end two epochs later."""
    per_epoch = -(-SAMPLES // (MICRO * MICROBATCHES))
    (new := directory / "epochs.new").write_text(str(steps // per_epoch + 2))
    new.rename(directory / "epochs")


def is_over(directory: Path, epoch: int) -> bool:
    """Whether a training ends that has done so many epochs."""
    try:
        return epoch >= int((directory / "epochs").read_text())
    except FileNotFoundError:
        return False


def data(seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator))


class Notes:
    """What a rank 0 notes of its steps, and the pause in each of them."""

    def __init__(self, directory: Path) -> None:
        self._pause = directory / "pause"
        self._steps = directory / "steps"
        self._file: IO[str] | None = None

    def end_step(self, step: int, rank: int, world: int) -> None:
        if self._pause.exists():
            time.sleep(float(self._pause.read_text()))
        if rank != 0 or not self._steps.is_dir():  # a worker that stays may be rank 0 later
            return
        if self._file is None:
            path = self._steps / f"{time.time_ns()}-{os.getpid()}"
            self._file = path.open("a", buffering=1)
        self._file.write(f"{time.monotonic()} {step} {world}\n")  # a clock that no fault sets


def train_stock(wrapper: str, seed: int, directory: Path, checkpoints: str) -> tuple[int, str]:
    """Train by `zero_torch.protect`; the number of steps and the final weight hash."""
    if wrapper != "plain":
        dist.init_process_group("gloo")
    model = make(wrapper, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data(seed), batch_size=MICRO, shuffle=True)
    elastic = {"seed": seed, "sample_ledger": str(directory / "ledger")}
    run = zero_torch.protect(
        model,
        optimizer,
        loader,
        microbatches=MICROBATCHES,
        config={"elastic": elastic, **(IN_MEMORY if wrapper != "plain" else {})},
    )
    run.load(checkpoints)
    world, rank = (dist.get_world_size(), dist.get_rank()) if wrapper != "plain" else (1, 0)
    notes = Notes(directory)
    while not is_over(directory, run.loader.epoch):
        for (batch,) in run.loader:
            run.backward(model(batch))
            if run.step(max_norm=1.0):
                notes.end_step(run.global_step, rank, world)
                if wrapper == "plain":
                    with (directory / "hashes").open("a") as hashes:
                        hashes.write(f"{run.global_step} {run.weight_hash()}\n")
            if wrapper != "plain":
                run.save_if_due(checkpoints, every_steps=SAVE_EVERY)
    run.save(checkpoints)
    weights = run.weight_hash()
    run.close()
    return run.global_step, weights if rank == 0 else ""


def train_engine(stage: int, seed: int, directory: Path, checkpoints: str) -> tuple[int, str]:
    """The same by the engine."""
    config = {
        **IN_MEMORY,
        "seed": seed,
        "train_batch_size": MICRO * MICROBATCHES,
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "elastic": {"sample_ledger": str(directory / "ledger"), "in_place": True},
    }
    model = make("plain", seed)
    engine, _, loader, _ = zero_deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        training_data=data(seed),
        config=config,
    )
    assert loader is not None
    engine.load_checkpoint(checkpoints)
    notes = Notes(directory)
    for (batch,) in _batches(loader, directory):
        engine.backward(engine(batch))
        at_boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        if at_boundary and engine.was_step_applied():
            notes.end_step(engine.global_steps, engine.global_rank, engine.world_size)
            if engine.checkpoint_due(SAVE_EVERY):
                engine.save_checkpoint(checkpoints)
    engine.save_checkpoint(checkpoints)
    weights = engine.weight_hash()
    steps, rank = engine.global_steps, engine.global_rank
    engine.destroy()
    return steps, weights if rank == 0 else ""


def _batches(loader: Any, directory: Path) -> Iterator[Any]:
    while not is_over(directory, loader.epoch):
        yield from loader


def main() -> None:
    kind, stage, seed, directory, checkpoints = sys.argv[1:]
    torch.set_num_threads(1)
    where = int(seed), Path(directory), checkpoints
    if kind == "engine":
        done, weights = train_engine(int(stage), *where)
    else:
        done, weights = train_stock(kind, *where)
    if weights:
        print(f"done: {done} steps, weight hash {weights}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
