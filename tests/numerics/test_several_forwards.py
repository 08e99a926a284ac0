"""Several forwards of one micro-batch: each has random numbers of its own, the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_deepspeed
from tests.numerics.promises.back_ends import Recipe, by_torch_alone, hashes
from tests.support.world import WorldPool
from zero_deepspeed.engine import Engine

IN = 6


def both(model: Any, batch: Tensor) -> Tensor:
    """The second under no_grad, as a target."""
    first: Tensor = model(batch)
    with torch.no_grad():
        target = model(batch)
    third: Tensor = model(batch)
    return first * target + third


@pytest.mark.parametrize("place", [("stage0", 1), ("stage1", 2), ("stage3", 3), ("plain", 1)])
def test_the_second_forward_goes_on_with_the_numbers_of_the_first_in_every_back_end(
    worlds: WorldPool, place: tuple[str, int]
) -> None:
    recipe = replace(Recipe(), loss=both)
    (expected,) = worlds.run(1, by_torch_alone, recipe)
    assert worlds.run(place[1], hashes, recipe, place[0], 4) == [expected] * place[1]


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(IN, 16), nn.Dropout(0.5), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


Use = Callable[[Engine, Tensor], None]


def one_by_one(engine: Engine, x: Tensor) -> None:
    """A backward behind each: at the end of a step it has numbers of the step behind it."""
    engine.backward(engine(x).square().mean())
    engine.backward(engine(x).abs().mean() + engine(x).square().mean())


def together(engine: Engine, x: Tensor) -> None:
    engine.backward(engine(x).square().mean() + engine(x).abs().mean())


def run_again(engine: Engine, x: Tensor) -> None:
    """As `together`, and each forward is run once more in backward."""
    x.requires_grad_()
    first, second = (checkpoint(engine, x, use_reentrant=False) for _ in range(2))
    engine.backward(first.square().mean() + second.abs().mean())


def used_twice(engine: Engine, x: Tensor, run: Callable[..., Tensor] | None = None) -> None:
    """The second loss needs the first forward as well, and has one of its own behind it."""
    forward = run or engine
    first = forward(x.requires_grad_())
    engine.backward(first.square().mean(), retain_graph=True)
    engine.backward((first * forward(x)).mean())


def used_twice_and_run_again(engine: Engine, x: Tensor) -> None:
    used_twice(engine, x, partial(checkpoint, engine, use_reentrant=False))


def put_back(engine: Engine, x: Tensor) -> None:
    """As `together`, after forwards without gradients whose random numbers are put back."""
    state = torch.get_rng_state()
    with torch.no_grad():
        engine(x), engine(x)
    torch.set_rng_state(state)
    together(engine, x)


def tried_again(engine: Engine, x: Tensor) -> None:
    """As `together`, after a backward that has failed, where it can be taken back."""
    if engine.micro_steps == 0:
        out = engine(x)
        out.register_hook(fail)
        with pytest.raises(MemoryError):
            engine.backward(out.square().mean())
    together(engine, x)


def fail(_: Tensor) -> None:
    raise MemoryError


def warmed_up(engine: Engine, x: Tensor) -> None:
    together(engine, x)
    engine.step()
    if engine.global_rank == 0:
        with torch.no_grad():
            engine(x)  # before the next batch is drawn


def trained(stage: int, use: Use) -> tuple[str, float | None]:
    """The weights, and the norm of the last step."""
    torch.manual_seed(0)
    model = Drops()
    engine, _, loader, _ = zero_deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=[torch.randn(IN) for _ in range(24)],
        config={
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        },
    )
    for batch in loader:
        use(engine, batch)
        if use is not warmed_up:
            engine.step()
    return engine.weight_hash(), engine.get_global_grad_norm()


def test_forwards_behind_a_backward_draw_the_same_at_every_world_size(worlds: WorldPool) -> None:
    # Up to rounding: owners add the further losses of a micro-batch as they come.
    norms = [norm for world in (1, 2, 4) for _, norm in worlds.run(world, trained, 0, one_by_one)]
    assert norms == [pytest.approx(norms[0], rel=1e-4)] * 7


@pytest.mark.parametrize("use", [run_again, put_back, tried_again, warmed_up])
@pytest.mark.parametrize("world", [1, 2])
def test_a_forward_that_is_run_again_draws_what_it_has_drawn(
    worlds: WorldPool, use: Use, world: int
) -> None:
    expected = worlds.run(world, trained, 0, together)
    assert worlds.run(world, trained, 0, use) == expected


@pytest.mark.parametrize("world", [1, 2])
def test_a_forward_draws_what_it_has_drawn_in_the_backward_of_every_loss(
    worlds: WorldPool, world: int
) -> None:
    expected = worlds.run(world, trained, 0, used_twice)
    assert worlds.run(world, trained, 0, used_twice_and_run_again) == expected


def masks() -> list[bool]:
    engine, *_ = zero_deepspeed.initialize(
        model=Drops(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        },
    )
    x = torch.ones(2, IN)
    one, other = engine(x), engine(x)
    engine.eval()
    engine(x)
    engine.train()
    third = engine(x)
    engine.backward(one.mean())
    engine.step()
    return [torch.equal(one, other), torch.equal(other, third), torch.equal(one, third)]


def test_each_forward_of_a_micro_batch_has_a_dropout_of_its_own(worlds: WorldPool) -> None:
    assert worlds.run(1, masks) == [[False] * 3]
