"""A process that trains and tells how many page faults a step takes when it has settled."""

from __future__ import annotations

import resource

import torch
import torch.distributed as dist

import zero_deepspeed
from tests.numerics.peak_memory import WIDTH, Stack

ROWS = 512
"""Two activations of each layer are 2 MB in fp32."""


def faults_of_a_step() -> int:
    """The least page faults of a step: in which order two threads allocate decides whether the
    heap grows once more in a later one, and on a busy machine that may be any of the first."""
    settings = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}}
    engine, *_ = zero_deepspeed.initialize(model=Stack(), config=settings)

    def step() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        engine.backward(engine(torch.ones(ROWS, WIDTH)))
        engine.step()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    return min(step() for _ in range(8))


def main() -> None:
    """The number on standard output."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(faults_of_a_step())


if __name__ == "__main__":
    main()
