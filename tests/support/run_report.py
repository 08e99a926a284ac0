"""What a job of any library says at its end: the same names of the same object."""

from __future__ import annotations

import os
from typing import Any

import zero_torch


def report(run: Any) -> None:
    """Print the last step and the weights. Collective."""
    assert isinstance(run, zero_torch.Run), type(run)
    assert run.ledger is not None, "the job records its samples"
    weights = run.weight_hash()
    if int(os.environ["RANK"]) == 0:
        print(f"done: step {run.global_step}, weight hash {weights}", flush=True)
