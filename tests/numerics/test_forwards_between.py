"""What runs between a forward and its backward, and a graph of two losses: one hash."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zero_deepspeed
from tests.support.training import divided
from tests.support.world import WorldPool
from zero_engine.core.engine import Engine

WIDTH, STEPS = 12, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """First and last layer are in the root unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def beside_a_reference(engine: Engine, x: Tensor) -> None:
    """As DPO does, and training on the model's own labels."""
    own = engine(x)
    with torch.no_grad():
        reference = engine(x + 1)
    engine.backward((own - reference).square().mean())


def after_an_evaluation(engine: Engine, x: Tensor) -> None:
    own = engine(x)
    engine.eval()
    with torch.inference_mode():
        engine(x + 1)
    engine.train()
    engine.backward(own.square().mean())


def twice(engine: Engine, x: Tensor) -> None:
    own = engine(x)
    engine.backward(own.square().mean(), retain_graph=True)
    engine.backward(own.abs().mean())


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("run", [beside_a_reference, after_an_evaluation, twice])
def test_stage_3_keeps_the_weights_of_the_root_until_backward_needs_them(
    worlds: WorldPool, run: Callable[[Engine, Tensor], None], world: int
) -> None:
    expected = worlds.run(world, trained, 0, run)
    assert worlds.run(world, trained, 3, run) == expected


def trained(stage: int, run: Callable[[Engine, Tensor], None]) -> str:
    torch.manual_seed(0)
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": divided(stage),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    model = Model()
    engine, *_ = zero_deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings
    )
    for _ in range(STEPS):
        run(engine, torch.randn(4, 6))
        engine.step()
    return engine.weight_hash()
