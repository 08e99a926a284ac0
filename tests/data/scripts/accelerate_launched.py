"""A loop of accelerate, without a word about DeepSpeed, as `accelerate launch` starts it."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.arange(32.0).view(8, 4), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
if accelerator.is_main_process:
    print("trained by", type(model).__module__, "at stage", model.zero_optimization_stage())
    print("on", accelerator.num_processes, "ranks:", model.global_steps, "steps", sys.argv[1:])
