"""A process that trains and tells how many page faults a step takes when it has settled.

And how much of what a step has freed is there, in bytes, before a fork and after it.
"""

from __future__ import annotations

import json
import os
import resource
import sys

import torch
import torch.distributed as dist
from torch import nn

import zero_deepspeed
from tests.numerics.peak_memory import WIDTH, Stack, resident

ROWS = 512
"""Two activations of each layer of a `Stack` are 2 MB in fp32."""
WIDE = 3000
"""A matrix of 36 MB: glibc maps what is larger than 32 MiB by itself, unless it is told not to."""


def make(kind: str) -> tuple[nn.Module, torch.Tensor]:
    """A model whose activations, or whose parameters, are large; and its input."""
    if kind == "activations":
        return Stack(), torch.ones(ROWS, WIDTH)
    wide = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, 1), nn.Flatten(0))
    return wide, torch.ones(1, WIDE)


def faults_of_a_step(kind: str) -> int:
    """The least page faults of a step: in which order two threads allocate decides whether the
    heap grows once more in a later one, and on a busy machine that may be any of the first."""
    model, batch = make(kind)
    settings = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3 if kind == "parameters" else 0},
    }
    engine, *_ = zero_deepspeed.initialize(model=model, config=settings)

    def step() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        engine.backward(engine(batch).sum())
        engine.step()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    return min(step() for _ in range(8))


def given_back_by_a_fork() -> int:
    """Bytes of what is free."""
    torch.ones(WIDE, WIDE)  # freed at once
    before = resident("VmRSS")
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
    return before - resident("VmRSS")


def main() -> None:
    """[faults, bytes] on standard output."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print([faults_of_a_step(json.load(sys.stdin)), given_back_by_a_fork()])


if __name__ == "__main__":
    main()
