"""An optimizer of DTensors steps on local tensors, and nobody can tell afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.world import WorldPool
from zero_torch.local_step import local_tensors, steps_by_element

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"amsgrad": True},
    "SGD": {"momentum": 0.9},
    "Adagrad": {},
    "NAdam": {},
    "RMSprop": {"centered": True, "momentum": 0.5},
}


def stepped(kind: str, locally: bool) -> Any:
    """All bits of two parameters and their state after three steps."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    parameters = [
        torch.nn.Parameter(distribute_tensor(torch.randn(5, 3), mesh, [Shard(0)])),
        torch.nn.Parameter(distribute_tensor(torch.randn(1), mesh, [Shard(0)])),
    ]
    optimizer: Any = getattr(torch.optim, kind)(
        parameters, lr=0.1, foreach=True, **OPTIMIZERS[kind]
    )
    for _ in range(3):
        for each in parameters:
            gradient = torch.randn(each.shape)
            each.grad = distribute_tensor(gradient, mesh, [Shard(0)])
        if locally:
            assert steps_by_element(optimizer)
            with local_tensors(optimizer):
                optimizer.step()
        else:
            optimizer.step()
    assert optimizer.param_groups[0]["params"] == parameters
    assert all(isinstance(each.grad, DTensor) for each in parameters)
    return [
        [each.full_tensor().tolist(), *(_told(k, v) for k, v in optimizer.state[each].items())]
        for each in parameters
    ]


def _told(key: str, value: Any) -> tuple[str, bool, Any]:
    lies = isinstance(value, DTensor)
    return key, lies, value.full_tensor().tolist() if lies else float(value)


@pytest.mark.parametrize(
    "kind",
    ["AdamW", *(pytest.param(kind, marks=pytest.mark.full) for kind in list(OPTIMIZERS)[1:])],
)
def test_a_step_on_local_tensors_has_the_bits_and_the_state_of_torch(
    worlds: WorldPool, kind: str
) -> None:
    expected, found = (worlds.run(3, stepped, kind, locally) for locally in (False, True))
    assert found == expected


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
