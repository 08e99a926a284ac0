"""A job of stock PyTorch under zero-agent: stock_job.py WRAPPER DIRECTORY [in-place] [stream].

It saves every 5 steps; with "in-place" it keeps each one in memory, and its processes if it can.
With "stream" its data can only be iterated.
`DIRECTORY/pause` has the seconds that each step takes more.
"""

import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import zero_torch
from tests.support.lane_data import StatefulRows
from tests.support.run_report import report
from tests.support.stock import LENGTH, VOCABULARY, make

SAMPLES, EPOCHS = 205, 2
"""41 steps of 10 samples in 5 micro-batches, the last of each epoch shorter."""


def main() -> None:
    wrapper, directory, in_place = sys.argv[1], Path(sys.argv[2]), "in-place" in sys.argv
    torch.set_num_threads(1)
    # As a script may: no socket of ours has it, but those of torch's loading processes have.
    socket.setdefaulttimeout(5 if in_place else 0.05)
    dist.init_process_group("gloo")
    model = make(wrapper)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    samples, streams = TensorDataset(tokens), "stream" in sys.argv
    loader: DataLoader[Any] = DataLoader(
        StatefulRows([*samples]) if streams else samples,
        batch_size=2,
        shuffle=None if streams else True,
        num_workers=int(in_place),
    )
    run = zero_torch.protect(
        model,
        optimizer,
        loader,
        microbatches=5,
        config={
            "elastic": {"sample_ledger": str(directory / "ledger"), "in_place": in_place},
            "checkpoint": {"ram": {}} if in_place else {},
        },
    )
    run.load(directory / "checkpoints")
    for _ in range(run.loader.epoch, EPOCHS):
        for (batch,) in run.loader:
            run.backward(model(batch))
            if run.step(max_norm=1.0):
                time.sleep(float((directory / "pause").read_text()))
            run.save_if_due(directory / "checkpoints", every_steps=5)
    report(run)
    run.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
