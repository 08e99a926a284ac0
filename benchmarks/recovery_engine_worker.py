"""A script under the engine for `recovery.py`, each of whose steps is kept in memory.

    recovery_engine_worker.py DIRECTORY IN_PLACE START_UP_S PARAMETERS STAGE STEPS PACE_S

It begins with a pause of `START_UP_S`, as one that imports and compiles much. It
keeps `Notes`.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from recovery_notes import Notes
from torch import nn
from torch.utils.data import TensorDataset

import zero_deepspeed

directory, in_place = Path(sys.argv[1]), sys.argv[2] == "in-place"
time.sleep(float(sys.argv[3]))
width, stage = round((float(sys.argv[4]) / 4) ** 0.5), int(sys.argv[5])
steps, pace_s = int(sys.argv[6]), float(sys.argv[7])
if torch.cuda.is_available():  # the nodes share the device, which NCCL does not
    dist.init_process_group("cpu:gloo,cuda:gloo")


class Loss(nn.Module):
    """A small model, with the loss of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))

    def forward(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.layers(batch[0]).square().mean()


engine, *_ = zero_deepspeed.initialize(
    model=Loss(),
    training_data=TensorDataset(torch.randn(4096, width)),
    config={
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage},
        "checkpoint": {"ram": {}},
        "elastic": {"in_place": in_place},
    },
)
engine.load_checkpoint(directory.with_name("checkpoints"))
notes, before = Notes(directory), -1
while engine.global_steps < steps:
    for batch in engine.training_dataloader:
        if engine.global_steps != before:
            time.sleep(pace_s)
        before = engine.global_steps
        engine.backward(engine([each.to(engine.device) for each in batch]))
        engine.step()
        if engine.global_steps > before:
            notes.finish(engine.global_steps, engine.world_size)
