"""An optimizer of DTensors steps on local tensors, and nobody can tell afterwards."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.world import WorldPool
from zero_torch.optimizers.local_step import steps_by_element


def look(*_: Any) -> None:
    """A hook."""


def test_an_optimizer_that_somebody_looks_at_keeps_its_dtensors(worlds: WorldPool) -> None:
    assert worlds.run(1, watched) == [(True, False, False)]


def watched() -> tuple[bool, bool, bool]:
    mesh = init_device_mesh("cpu", (1,))
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([parameter])
    alone = steps_by_element(optimizer)
    optimizer.register_step_post_hook(look)
    return alone, steps_by_element(optimizer), steps_by_element(torch.optim.Adafactor([parameter]))
