"""A process that trains and tells how many page faults its last step took."""

from __future__ import annotations

import resource

import torch
import torch.distributed as dist

import zero_engine
from tests.numerics.peak_memory import WIDTH, Stack

ROWS = 512
"""Two activations of each layer are 2 MB in fp32."""


def faults_of_a_step() -> int:
    """Page faults of the fourth step."""
    settings = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}}
    engine, *_ = zero_engine.initialize(model=Stack(), config=settings)
    before = 0
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        engine.backward(engine(torch.ones(ROWS, WIDTH)))
        engine.step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def main() -> None:
    """The number on standard output."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(faults_of_a_step())


if __name__ == "__main__":
    main()
