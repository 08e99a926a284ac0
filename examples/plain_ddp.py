"""Stock DDP under zero-agent: the script saves and leaves before the world size changes.

zero-agent --nnodes=1:4 --max-restarts=3 examples/plain_ddp.py
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zero_agent

STEPS, SAVE_EVERY = 200, 50


def agreed(flag: bool) -> bool:
    """Whether the flag is set on any rank, because all ranks must save after the same step."""
    dist.all_reduce(value := torch.tensor(float(flag)), op=dist.ReduceOp.MAX)
    return bool(value)


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "plain_ddp.pt")
    dist.init_process_group("gloo")  # "nccl" on GPUs
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = 0
    if path.exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    for step in range(first + 1, STEPS + 1):
        inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        loss = F.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        zero_agent.heartbeat(step)  # a script that hangs is found by it
        leaving = agreed(zero_agent.should_leave())
        if dist.get_rank() == 0 and (leaving or step % SAVE_EVERY == 0 or step == STEPS):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, f"{path}.new")
            os.replace(f"{path}.new", path)  # a killed save leaves the old file
        if leaving:
            dist.barrier()  # no rank leaves while another one needs it
            zero_agent.leave()
    print(f"step {STEPS} of {STEPS}, begun after step {first}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
