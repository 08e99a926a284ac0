"""The script of `recovery_engine_worker.py` in stock PyTorch: DDP, protected.

recovery_ddp_worker.py DIRECTORY IN_PLACE START_UP_S PARAMETERS STAGE STEPS PACE_S
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from recovery_notes import Notes
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import zero_torch

directory, in_place = Path(sys.argv[1]), sys.argv[2] == "in-place"
time.sleep(float(sys.argv[3]))
width = round((float(sys.argv[4]) / 4) ** 0.5)
steps, pace_s = int(sys.argv[6]), float(sys.argv[7])
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(*(nn.Linear(width, width) for _ in range(4))))
run = zero_torch.protect(
    model,
    torch.optim.AdamW(model.parameters()),
    DataLoader(TensorDataset(torch.randn(4096, width)), batch_size=2),
    microbatches=2,
    config={"checkpoint": {"ram": {}}, "elastic": {"in_place": in_place}},
)
run.load(directory.with_name("checkpoints"))
notes, before = Notes(directory), -1
while run.global_step < steps:
    for (batch,) in run.loader:
        if run.global_step != before:
            time.sleep(pace_s)
        before = run.global_step
        run.backward(model(batch).square().mean())
        run.step()
        if run.global_step > before:
            notes.finish(run.global_step, dist.get_world_size())
