"""However a script uses its modules, the bits under zero_torch are those of torch alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from tests.numerics.promises.back_ends import (
    IN,
    PLACES,
    Place,
    Recipe,
    by_torch_alone,
    everywhere,
)
from tests.support.world import WorldPool


class Uses(nn.Module):
    """Three layers of one size, which a forward uses in some way. Returns the mean loss."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.down, self.last = (nn.Linear(IN, IN) for _ in range(3))
        self.head = nn.Linear(IN, 1)
        if how == "tied":
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return (self.head(self.body(x)) - 1.0).square().mean()

    def body(self, x: Tensor) -> Tensor:
        return BODIES[self.how](self, x)


def again(x: Tensor, *layers: nn.Module, reentrant: bool) -> Tensor:
    """Layer after layer, each of which computes its activations again in the backward."""
    for layer in layers:
        x = torch.tanh(checkpoint(layer, x, use_reentrant=reentrant))
    return x


def partly_without_gradient(m: Uses, x: Tensor) -> Tensor:
    with torch.no_grad():
        before = m.down(x)
    return torch.tanh(m.down(before)) + m.last(m.first(x))


def with_a_gradient(m: Uses, x: Tensor) -> Tensor:
    y = torch.tanh(m.down(m.first(x.requires_grad_())))
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return m.last(y) + slope


BODIES: dict[str, Callable[[Uses, Tensor], Tensor]] = {
    "once": lambda m, x: m.last(m.down(torch.tanh(m.first(x)))),
    "twice": lambda m, x: m.last(m.down(torch.tanh(m.down(m.first(x))))),
    "twice, and first": lambda m, x: m.last(m.first(m.down(torch.tanh(m.down(x))))),
    "three times": lambda m, x: m.last(m.down(m.down(torch.tanh(m.down(m.first(x)))))),
    "unused": lambda m, x: torch.tanh(m.down(m.first(x))),
    "tied": lambda m, x: m.last(torch.tanh(m.down(torch.tanh(m.first(x))))),
    "input requires a gradient": lambda m, x: m.last(m.down(m.first(x.requires_grad_()))),
    "partly without a gradient": partly_without_gradient,
    "a gradient of its own": with_a_gradient,
    "reentrant": lambda m, x: m.last(again(m.first(x), m.down, reentrant=True)),
    "all reentrant": lambda m, x: again(
        x.requires_grad_(), m.first, m.down, m.last, reentrant=True
    ),
    "twice and reentrant": lambda m, x: m.last(again(m.first(x), m.down, m.down, reentrant=True)),
    "saved": lambda m, x: again(x, m.first, m.down, m.last, reentrant=False),
    "twice and saved": lambda m, x: m.last(again(m.first(x), m.down, m.down, reentrant=False)),
}
OF_DDP: dict[str, tuple[tuple[str, Any], ...]] = {
    "unused": (("find_unused_parameters", True),),
    "twice and reentrant": (("static_graph", True),),
}
NOT_IN_STOCK_FSDP2 = {"a gradient of its own"}
"""Torch refuses it by itself."""
LOST_BY_FSDP2 = {"twice and reentrant"}
"""Stock FSDP2 takes the gradient of one call alone."""


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


@PLACES
@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize("how", BODIES)
@pytest.mark.corners(how=["all reentrant", "twice and reentrant"], own_loop=[True])
def test_its_bits_are_those_of_torch_alone(
    worlds: WorldPool, tmp_path: Path, how: str, own_loop: bool, places: list[Place]
) -> None:
    recipe = Recipe(
        model=partial(Uses, how),
        optimizer=adam,
        own_loop=own_loop,
        of_wrapper=OF_DDP.get(how, ()),
    )
    places = [p for p in places if p[0] in ("plain", "ddp") or how not in NOT_IN_STOCK_FSDP2]
    (expected,) = worlds.run(1, by_torch_alone, recipe)
    for (back_end, _), found in everywhere(worlds, recipe, tmp_path, places).items():
        if how in LOST_BY_FSDP2 and back_end in ("fsdp2", "hsdp"):
            assert "FSDP2 has not reduced all gradients of down" in found[0]
            assert "set use_reentrant=False" in found[0]
        else:
            assert found == expected, back_end


def test_a_layer_without_parameters_may_be_sharded_by_itself(
    worlds: WorldPool, tmp_path: Path
) -> None:
    """As by a script that calls fully_shard for every layer."""
    recipe = Recipe(units=("down", "drop"))
    (expected,) = worlds.run(1, by_torch_alone, recipe)
    assert everywhere(worlds, recipe, tmp_path, [("fsdp2", 2)]) == {("fsdp2", 2): expected}
