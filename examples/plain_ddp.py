"""Stock DDP with zero_torch. It can be killed at any step and resume at any world size.

    zero-agent --nnodes=1:4 --max-restarts=3 examples/plain_ddp.py

The final weights are the same in every case, and those of fsdp2.py.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import zero_torch

EPOCHS, SAVE_EVERY = 20, 25


def main() -> None:
    directory = sys.argv[1] if len(sys.argv) > 1 else "plain_ddp"
    dist.init_process_group("gloo")  # "cpu:gloo,cuda:nccl" on GPUs
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(160, 8)
    loader = DataLoader(
        TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True
    )

    run = zero_torch.protect(model, optimizer, loader, microbatches=8)
    run.load(directory)  # the newest complete checkpoint, if there is one
    first = run.global_step
    for _ in range(run.loader.epoch, EPOCHS):
        for batch, targets in run.loader:  # one micro-batch
            run.backward(F.mse_loss(model(batch), targets))
            run.step(max_norm=1.0)  # acts at the last micro-batch of a step
            run.save_if_due(directory, every_steps=SAVE_EVERY)
    weights = run.weight_hash()  # all ranks compute it together
    if dist.get_rank() == 0:
        print(f"step {run.global_step}, begun after step {first}, weights {weights}", flush=True)
    run.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
