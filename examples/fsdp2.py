"""Stock FSDP2 under zero-agent, with checkpoints of torch.distributed.checkpoint.

    zero-agent --nnodes=1:4 --max-restarts=3 examples/fsdp2.py

As under torchrun, the bits of the weights depend on the world size.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zero_agent

STEPS, SAVE_EVERY = 100, 25


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "fsdp2")
    dist.init_process_group("gloo")  # "nccl" on GPUs
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    saved = (int(it.parent.name) for it in directory.glob("*/.metadata"))  # written last
    first = max(saved, default=0)
    if first:
        dcp.load(loaded := state(), checkpoint_id=directory / str(first))
        weights, moments = loaded["model"], loaded["optimizer"]
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    for step in range(first + 1, STEPS + 1):
        inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        F.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
        leaving = torch.tensor(float(zero_agent.should_leave()))
        dist.all_reduce(leaving, op=dist.ReduceOp.MAX)  # all ranks save after the same step
        if leaving or step % SAVE_EVERY == 0:
            dcp.save(state(), checkpoint_id=directory / str(step))  # a collective
        if leaving:
            zero_agent.leave()
    print(f"step {STEPS} of {STEPS}, begun after step {first}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
