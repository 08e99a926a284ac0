"""A loop of accelerate: one hash at every number of ranks, however often it is killed and resumes.

zero-agent --nnodes=1:3 --max-restarts=3 examples/accelerate_loop.py DIRECTORY
"""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zero_libraries.accelerate import protect

EPOCHS, SAVE_EVERY, MICROBATCHES = 5, 3, 6


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model, inputs = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)), torch.randn(96, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 8))
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 4, shuffle=True)
    run, net, prepared, loader, scheduler = protect(
        accelerator, model, optimizer, data, scheduler, microbatches=MICROBATCHES
    )
    run.load(sys.argv[1])
    first = run.global_step
    for _ in range(run.loader.epoch, EPOCHS):
        for batch, targets in loader:
            with accelerator.accumulate(net):
                accelerator.backward(nn.functional.mse_loss(net(batch), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                prepared.step()
                scheduler.step()
                prepared.zero_grad()
            run.save_if_due(sys.argv[1], every_steps=SAVE_EVERY)
    accelerator.print(f"step {run.global_step} from {first}, weights {run.weight_hash()}")
    run.close()


if __name__ == "__main__":
    main()
