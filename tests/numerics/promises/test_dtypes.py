"""Gradients of every dtype: torch's bits with the sum's precision, or a refusal by name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zero_engine
from tests.numerics.promises.back_ends import (
    IN,
    PLACES,
    STOCK,
    Net,
    Place,
    Recipe,
    by_torch_alone,
    everywhere,
)
from tests.support.world import WorldError, WorldPool

REAL = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


class Of(Net):
    """A model of one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.up.weight.dtype))


class Mixed(nn.Module):
    """Layers of several dtypes, one of them complex."""

    def __init__(self, down: torch.dtype) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(IN, 7), nn.Linear(7, 5, dtype=down)
        self.wide = nn.Linear(5, 3, dtype=torch.float64)
        self.turn = nn.Linear(3, 3, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(torch.tanh(self.down(self.up(x).to(self.down.weight.dtype))).double())
        return (self.turn(x.to(torch.complex64)) - 1.0).abs().square().mean()


UNITS = ("up", "down", "wide", "turn")


class Complex(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(IN, 7, dtype=dtype), nn.Linear(7, 3, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(self.up(x.to(self.up.weight.dtype))) - 1.0).abs().square().mean()


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def momentum(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.corners(dtype=[torch.float64], own_loop=[True])
@PLACES
def test_real_numbers_have_the_bits_of_torch_alone(
    worlds: WorldPool, tmp_path: Path, dtype: torch.dtype, own_loop: bool, places: list[Place]
) -> None:
    recipe = Recipe(model=partial(Of, dtype), optimizer=momentum, own_loop=own_loop)
    (expected,) = worlds.run(1, by_torch_alone, recipe)
    stock = [place for place in places if place in STOCK]
    for (back_end, _), found in everywhere(worlds, recipe, tmp_path, stock).items():
        if dtype.itemsize == 2 and back_end in ("fsdp2", "hsdp"):
            assert f"has the dtype {dtype} on a CPU, whose optimizer kernels round" in found[0]
        else:
            assert found == expected, back_end


@pytest.mark.full
@pytest.mark.parametrize("own_loop", [False, True])
def test_complex_numbers_have_the_bits_of_torch_alone(
    worlds: WorldPool, tmp_path: Path, own_loop: bool
) -> None:
    recipe = Recipe(model=partial(Complex, torch.complex64), optimizer=adam, own_loop=own_loop)
    (expected,) = worlds.run(1, by_torch_alone, recipe)
    assert everywhere(worlds, recipe, tmp_path) == dict.fromkeys(STOCK, expected)


@pytest.mark.full
@pytest.mark.parametrize("own_loop", [False, True])
def test_a_model_of_several_dtypes_has_the_bits_of_torch_alone(
    worlds: WorldPool, tmp_path: Path, own_loop: bool
) -> None:
    for down, places in ((torch.float32, STOCK), (torch.bfloat16, [("plain", 1), ("ddp", 2)])):
        model, root = partial(Mixed, down), tmp_path / str(down)
        recipe = Recipe(model=model, optimizer=momentum, own_loop=own_loop, units=UNITS)
        (expected,) = worlds.run(1, by_torch_alone, recipe)
        assert everywhere(worlds, recipe, root, places) == dict.fromkeys(places, expected)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "units"),
    [(partial(Of, torch.float64), ("down",)), (partial(Mixed, torch.float32), UNITS)],
)
def test_the_norm_is_one_everywhere(
    worlds: WorldPool, tmp_path: Path, model: Any, units: tuple[str, ...]
) -> None:
    recipe = Recipe(model=model, optimizer=momentum, max_norm=0.01, units=units)
    found = everywhere(worlds, recipe, tmp_path)
    assert found == dict.fromkeys(STOCK, found["plain", 1])
    assert len(found["plain", 1]) == 4


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float8_e4m3fn])
def test_a_dtype_that_cannot_be_summed_or_saved_is_refused_by_name(
    worlds: WorldPool, tmp_path: Path, dtype: torch.dtype
) -> None:
    recipe = Recipe(model=partial(Complex, torch.float32), optimizer=partial(converted, dtype))
    (found,) = everywhere(worlds, recipe, tmp_path, [("plain", 1)]).values()
    assert f"ConfigError: up.weight has the dtype {dtype}" in found[0]


def converted(dtype: torch.dtype, model: nn.Module) -> Optimizer:
    model.up.weight = nn.Parameter(torch.zeros(7, IN, dtype=dtype))
    return momentum(model)


class Images(nn.Module):
    """A convolution over images, and a buffer."""

    def __init__(self, layout: torch.memory_format, buffer: torch.dtype) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, (2, 1))
        self.register_buffer("seen", torch.zeros(2, dtype=buffer))
        self.to(memory_format=layout)

    def forward(self, x: Tensor) -> Tensor:
        images = x.view(-1, 2, 3, 1).contiguous(memory_format=torch.channels_last)
        return (self.conv(images) - 1.0).square().mean()


@pytest.mark.full
def test_a_model_that_no_checkpoint_can_hold_is_refused_by_protect(
    worlds: WorldPool, tmp_path: Path
) -> None:
    usual, last = torch.contiguous_format, torch.channels_last
    places = [("plain", 1), ("ddp", 2)]

    def of(layout: torch.memory_format, buffer: torch.dtype) -> Recipe:
        return Recipe(model=partial(Images, layout, buffer), optimizer=momentum)

    (expected,) = worlds.run(1, by_torch_alone, of(usual, torch.float64))
    found = everywhere(worlds, of(usual, torch.float64), tmp_path / "usual", places)
    assert found == dict.fromkeys(places, expected)
    for told in everywhere(worlds, of(last, torch.float64), tmp_path / "last", places).values():
        assert "ConfigError: conv.weight is not contiguous in memory" in told[0]
    for told in everywhere(worlds, of(usual, torch.complex128), tmp_path / "of", places).values():
        assert "ConfigError: seen has the dtype torch.complex128" in told[0]


def engine_of(dtype: torch.dtype, bf16: bool) -> None:
    model = Complex(dtype)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    }
    zero_engine.initialize(model=model, config=settings)


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "bf16", "problem"),
    [
        (torch.complex64, True, "parameter up.weight is torch.complex64, and the engine sums"),
        (torch.complex64, False, "parameter up.weight is torch.complex64, and the engine sums"),
        (torch.float64, False, "parameter up.weight is torch.float64 in fp32 training"),
    ],
)
def test_the_engine_refuses_what_it_would_round(
    worlds: WorldPool, dtype: torch.dtype, bf16: bool, problem: str
) -> None:
    with pytest.raises(WorldError, match=problem):
        worlds.run(1, engine_of, dtype, bf16)
