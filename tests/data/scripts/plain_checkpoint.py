"""Two processes save a module and its AdamW, each with half of the tensors; one loads all of it.

Nothing but zero_contract, zero_comm and zero_checkpoint can be imported here.

    plain_checkpoint.py ROOT
"""

import importlib.util
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import zero_checkpoint

root = Path(sys.argv[1])
for above in ("zero_engine", "zero_deepspeed", "zero_data", "zero_orchestrator", "zero_agent"):
    assert importlib.util.find_spec(above) is None, above


def trained():
    """A module and its AdamW after three steps, the same in every process."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def share(tensor, rank):
    """The first or the second half of a tensor's elements."""
    flat, middle = tensor.detach().reshape(-1), tensor.numel() // 2
    part = flat[:middle] if rank == 0 else flat[middle:]
    return zero_checkpoint.Part(part, 0 if rank == 0 else middle, tuple(tensor.shape))


def save_as(rank):
    store = dist.FileStore(str(root / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(0, 60))
    model, optimizer = trained()
    weights = {name: share(value, rank) for name, value in model.state_dict().items()}
    # Both have the optimizer's state: each writes some of it.
    zero_checkpoint.save(
        root / "checkpoints",
        {"model": weights, "optimizer": optimizer.state_dict(), "epoch": 3, "rank": rank},
        step=3,
    )


children = []
for rank in (0, 1):
    if (child := os.fork()) == 0:
        save_as(rank)
        os._exit(0)
    children.append(child)
assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]

found = zero_checkpoint.load(root / "checkpoints")
model, optimizer = trained()
expected = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
assert (found.step, found.state["epoch"], found.state["rank"]) == (3, 3, 0)
for name, value in expected["model"].items():
    assert torch.equal(found.state["model"][name], value), name
for number, moments in expected["optimizer"]["state"].items():
    for key, value in moments.items():
        assert torch.equal(found.state["optimizer"]["state"][number][key], value), (number, key)
assert found.state["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
model.load_state_dict(found.state["model"])
optimizer.load_state_dict(found.state["optimizer"])
files = sorted(found.path.glob("*.safetensors"))
assert len(files) == 2
assert all(file.stat().st_size > 4096 for file in files)
print(zero_checkpoint.weight_hash(found.state["model"].items()))
