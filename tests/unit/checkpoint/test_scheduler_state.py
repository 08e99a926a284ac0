"""The state of a learning-rate scheduler goes through a manifest and back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import (
    ConstantLR,
    LambdaLR,
    LRScheduler,
    MultiStepLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from zero_checkpoint.format.manifest import check_json
from zero_checkpoint.state.torch_state import plain, restore_schedule, schedule_as_json

MADE: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "milestones": lambda optimizer: MultiStepLR(optimizer, [1, 3, 3], gamma=0.5),
    "of several": lambda optimizer: SequentialLR(
        optimizer, [ConstantLR(optimizer, 0.5, 2), MultiStepLR(optimizer, [1])], milestones=[2]
    ),
    "numpy": lambda optimizer: LambdaLR(optimizer, lambda step: np.cos(0.5 * step)),
    "plateau": ReduceLROnPlateau,
}


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1)], lr=1.0)


def stepped(scheduler: LRScheduler, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        scheduler.optimizer.step()
        scheduler.step(*[0.1] * isinstance(scheduler, ReduceLROnPlateau))
        rates.append(float(scheduler.optimizer.param_groups[0]["lr"]))
    return rates


@pytest.mark.parametrize("name", MADE)
def test_a_scheduler_that_is_restored_goes_on_with_the_same_rates(name: str) -> None:
    before, after = (MADE[name](optimizer()) for _ in range(2))
    stepped(before, 2)
    saved = schedule_as_json(before)
    check_json(saved, "meta")
    restore_schedule(after, json.loads(json.dumps(saved)))
    for group in after.optimizer.param_groups:  # as a load of the optimizer does
        group["lr"] = plain(before.optimizer.param_groups[0]["lr"], "lr")
    assert stepped(after, 4) == stepped(before, 4)
    assert {k: type(v) for k, v in after.state_dict().items() if k == "milestones"} == {
        k: type(v) for k, v in before.state_dict().items() if k == "milestones"
    }


def test_numbers_of_numpy_are_numbers_of_json() -> None:
    values = [np.float64(0.1), np.float32(0.5), np.int64(3), np.bool_(True), (np.float64(2), 1)]
    kept = plain(values, "betas")
    check_json(kept, "meta")
    assert kept == [0.1, 0.5, 3, True, [2.0, 1]]
    assert math.isclose(kept[0], 0.1, rel_tol=0)
