"""A job of any back end, one of whose ranks is killed in a save: killed_job.py BACK_END DIRECTORY.

Every step is kept in memory and saved, and the checkpoint before it deleted. `DIRECTORY/kill` names
a rank, and the change of a file before which it dies; whoever reads it takes it away.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from tests.numerics.promises.back_ends import STEPS, WITH_EVERYTHING, training
from tests.support.deadly import DEADLY
from zero_comm.worker.distributed import init_distributed


def main() -> None:
    back_end, here = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    init_distributed()
    sections = {
        "elastic": {"sample_ledger": str(here / "ledger")},
        "checkpoint": {"async": True, "keep_last": 2, "ram": {}},
    }
    own = training(replace(WITH_EVERYTHING, sections=sections), back_end)
    arm(here)
    own.load(str(here / "checkpoints"))
    for _ in own.steps(STEPS):
        own.save(str(here / "checkpoints"))
    own.close()
    weights = own.hash()
    if os.environ["RANK"] == "0":
        print(f"done: step {own.step}, changes {DEADLY.changes}, weight hash {weights}", flush=True)


def arm(here: Path) -> None:
    """Be the one that dies, if none has yet."""
    rank, number = map(int, (here / "kill").read_text().split())
    dead = here / "dead"
    first = os.environ["RANK"] == str(rank) and not dead.exists()
    if first:
        dead.touch()
    DEADLY.arm([here / "checkpoints", here / "ledger", "/dev/shm"], number if first else 0)


if __name__ == "__main__":
    main()
