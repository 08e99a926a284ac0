"""A job that reads lanes: python lanes_job.py BACK_END KIND WORKERS DIRECTORY.

It saves every 3 steps. `DIRECTORY/pause` has the seconds that each step takes more.
"""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from tests.numerics.promises.back_ends import Recipe, training
from tests.support.lane_data import KINDS

STEPS = 19
"""Into the fifth epoch."""
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""What the process has that no launcher has started."""


def main() -> None:
    back_end, kind, workers, where = sys.argv[1:]
    directory = Path(where)
    torch.set_num_threads(1)
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    ledger = {"elastic": {"sample_ledger": str(directory / "ledger")}}
    given = replace(Recipe(**KINDS[kind]), workers=int(workers), sections=ledger)
    own = training(given, back_end)
    own.load(str(directory / "checkpoints"))
    while own.step < STEPS:
        for (batch,) in own.loader:
            before = own.step
            own.backward(batch)
            own.end()
            if own.step > before and own.step % 3 == 0:
                own.save(str(directory / "checkpoints"))
            if own.step > before:
                time.sleep(float((directory / "pause").read_text()))
            if own.step == STEPS:
                break
    weights = own.hash()
    if dist.get_rank() == 0:
        print(f"done: step {own.step}, weight hash {weights}", flush=True)
    own.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
