"""Modules inside of a layer that are called without the layer: one hash, whoever divides it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_deepspeed
from tests.support.training import DIVIDED, config
from tests.support.world import WorldPool
from zero_engine.core.engine import Engine

WIDTH = 12


class Reading(nn.Module):
    """Uses the weights of a module that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.inner.weight, self.inner.bias)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.reading = nn.LayerNorm(WIDTH), Reading()
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.attend(x))

    def attend(self, x: Tensor) -> Tensor:
        x = self.reading(self.norm(x))
        return x + self.attention(x, x, x, need_weights=False)[0]

    def mix(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def twice_in_a_row(layer: Layer, x: Tensor) -> Tensor:
    return layer(layer(x))


def by_methods(layer: Layer, x: Tensor) -> Tensor:
    return layer.mix(layer.attend(x))


def recomputed(layer: Layer, x: Tensor) -> Tensor:
    return checkpoint(by_methods, layer, x, use_reentrant=False)


def recomputed_in_parts(layer: Layer, x: Tensor) -> Tensor:
    return checkpoint(layer.mix, checkpoint(layer.attend, x, use_reentrant=True))


def after_a_look(layer: Layer, x: Tensor) -> Tensor:
    with torch.no_grad():
        layer.up(layer.norm(x))
    return layer.mix(layer.attend(x))


def after_an_error(layer: Layer, x: Tensor) -> Tensor:
    try:
        layer.up(x[..., 1:])
    except RuntimeError:
        return layer(x)
    raise AssertionError


WAYS: dict[str, Callable[[Layer, Tensor], Tensor]] = {
    each.__name__: each
    for each in (
        twice_in_a_row,
        by_methods,
        recomputed,
        recomputed_in_parts,
        after_a_look,
        after_an_error,
    )
}
FROZEN: dict[str, tuple[str, ...]] = {"trained": (), "partly frozen": ("up", "reading", "norm")}


class Model(nn.Module):
    def __init__(self, way: Callable[[Layer, Tensor], Tensor], frozen: tuple[str, ...]) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.layers.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        for layer in self.layers[:2]:
            for name in frozen:
                layer.get_submodule(name).requires_grad_(False)
        self._way = way

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers[:2]:
            x = self._way(layer, x)
        for each in self.layers[2]:
            x = each(x)
        return self.head(x).square().mean()


SETTINGS: dict[str, dict[str, Any]] = {
    "stage 3": {"zero_optimization": DIVIDED},
    "stage 3, nothing ahead": {"zero_optimization": DIVIDED | {"stage3_prefetch_bucket_size": 0}},
    "overlapped": {"zero_optimization": {"stage": 2}, "elastic": {"overlap_param_gather": True}},
}


def train(way: str, frozen: str, settings: dict[str, Any]) -> tuple[str, float]:
    torch.manual_seed(3)
    engine: Engine
    engine, *_ = zero_deepspeed.initialize(
        model=Model(WAYS[way], FROZEN[frozen]),
        config=config(0, train_batch_size=6) | {"train_micro_batch_size_per_gpu": 1} | settings,
    )
    number = 0
    while engine.global_steps < 2:
        micro = engine._run.microbatch().index
        engine.backward(engine(torch.full((1, 4, 3), 0.1 * micro + engine.global_steps)))
        engine.step()
        number += 1
    return engine.weight_hash(), engine.mean_loss


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.corners(frozen=["partly frozen"], way=["by_methods"])
def test_a_module_is_called_without_its_layer(
    worlds: WorldPool, way: str, frozen: str, settings: dict[str, Any]
) -> None:
    (whole,) = worlds.run(1, train, way, frozen, {})
    assert worlds.run(2, train, way, frozen, settings) == [whole] * 2
