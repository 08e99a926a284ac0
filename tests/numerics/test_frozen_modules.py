"""Frozen modules at stage 3: gathered for backward, gone when it has passed them; so are graphs."""

from __future__ import annotations

import gc
import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import zero_deepspeed
from tests.support.training import divided
from tests.support.world import WorldPool
from zero_engine.core.engine import Engine

WIDTH = 8


class Mixing(nn.Module):
    """A frozen block with a second input, which it may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3, requires_grad=False)

    def forward(self, x: Tensor, beside: Tensor, *, mixes: bool) -> Tensor:
        y = torch.tanh(x @ self.weight)
        return y + torch.sin(beside @ self.weight) if mixes else y


class Marked(torch.autograd.Function):
    """Puts an object into the graph, which lives as long as that."""

    alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark = type("Mark", (), {})()
        Marked.alive.add(ctx.mark)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Prompted(nn.Module):
    """Trains an input, and a prompt that every block gets besides: itself, or computed from it."""

    def __init__(self, beside: str) -> None:
        super().__init__()
        self.beside = beside
        self.first = nn.Linear(WIDTH, WIDTH)
        self.prompt = nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList(Mixing() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = Marked.apply(self.first(x))
        beside = self.prompt if self.beside == "leaf" else self.prompt * 2
        for block in self.blocks:
            x = block(x, beside, mixes=self.beside != "unused")
        return x.square().mean()


def make_prompted(stage: int, beside: str) -> Engine:
    torch.manual_seed(3)
    model = Prompted(beside)
    settings = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": divided(stage),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    engine, *_ = zero_deepspeed.initialize(model=model, config=settings)
    return engine


def train_prompted(stage: int, beside: str) -> tuple[str, int]:
    """The weights after three steps with further forwards between; the hooks that are left."""
    engine = make_prompted(stage, beside)
    generator = torch.Generator().manual_seed(5)
    while engine.global_steps < 3:
        x, other = torch.randn(2, 1, WIDTH, generator=generator)
        engine(other)
        loss = engine(x)
        engine(other)
        engine.backward(loss + 0.5 * engine(x))
        engine.step()
    return engine.weight_hash(), len(engine.module.prompt._backward_hooks or ())


@pytest.mark.parametrize("beside", ["leaf", "computed", "unused"])
@pytest.mark.corners(beside=["unused"])
def test_with_several_inputs_they_train_to_the_bits_of_stage_2(
    worlds: WorldPool, beside: str
) -> None:
    divided, shared = (worlds.run(2, train_prompted, stage, beside) for stage in (3, 2))
    assert divided == shared
    assert [hooks for _, hooks in divided] == [0, 0]


def test_a_forward_without_a_backward_keeps_nothing_of_its_graph(worlds: WorldPool) -> None:
    assert worlds.run(1, forward_only) == [[1, 0, 0, 0]]


def forward_only() -> list[int]:
    """The graphs that there are with a loss, and without it, without waiting for a collection."""
    engine = make_prompted(3, "computed")
    gc.disable()
    loss = engine(torch.ones(1, WIDTH))
    seen = [len(Marked.alive)]
    del loss
    for _ in range(3):
        seen.append(len(Marked.alive))
        engine(torch.ones(1, WIDTH))
    gc.enable()
    return seen
