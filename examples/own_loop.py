"""A loop as scripts have it: gradients of several batches, a schedule, evaluation, checkpoints.

    zero-agent --nnodes=1:4 --max-restarts=3 examples/own_loop.py [DIRECTORY]

All losses and the final weights are the same at every world size and after every kill.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import zero_torch

EPOCHS, EVALUATE_EVERY, SAVE_EVERY = 8, 10, 10


def evaluate(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """The mean loss over data that all ranks share; each of them computes it."""
    model.eval()
    with torch.no_grad():
        loss = F.mse_loss(model(inputs), targets)
    model.train()
    return float(loss)


def main() -> None:
    directory = sys.argv[1] if len(sys.argv) > 1 else "own_loop"
    dist.init_process_group("gloo")  # "cpu:gloo,cuda:nccl" on GPUs
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 1))
    inputs, held_out = torch.randn(160, 8), torch.randn(40, 8)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 8))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=4, shuffle=True)

    # A step has 8 batches of 4: 8 on one rank, 4 on each of two, 3 on each of three.
    run = zero_torch.protect(model, optimizer, loader, microbatches=8, scheduler=scheduler)
    run.load(directory)
    for _ in range(run.loader.epoch, EPOCHS):
        for batch, targets in run.loader:
            run.backward(F.mse_loss(model(batch), targets))
            if run.step(max_norm=1.0) and run.global_step % EVALUATE_EVERY == 0:  # a step has ended
                loss = evaluate(net, held_out, held_out.sum(1, keepdim=True))
                if dist.get_rank() == 0:
                    print(f"step {run.global_step}: loss {loss}, norm {run.grad_norm}", flush=True)
            run.save_if_due(directory, every_steps=SAVE_EVERY)
    print(f"step {run.global_step}, weights {run.weight_hash()}", flush=True)  # all ranks
    run.close()


if __name__ == "__main__":
    main()
