"""Ranks that take different branches: the same bits as at world 1, or an error with names."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import zero_deepspeed
from tests.support.inside import looking_often
from tests.support.training import config, divided, fingerprint, train
from tests.support.world import GROUP_TIMEOUT_S, WorldPool
from zero_comm.errors import Diverged
from zero_contract.errors import PeerLost
from zero_engine.core.engine import Engine

WIDTH = 33


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Branching(nn.Module):
    """Which layers run, and in which order, depends on the sample."""

    def __init__(self, ways: list[list[int]]) -> None:
        super().__init__()
        self.embed = nn.Linear(1, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(5))
        self._ways = ways

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for number in self._ways[int(x[0, 0].item() * 100) % len(self._ways)]:
            hidden = self.layers[number](hidden)
        return F.mse_loss(hidden, torch.ones_like(hidden))


class Samples(Dataset[Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index / 100])


def branching_engine(stage: int, ways: list[list[int]], **zero: Any) -> Engine:
    torch.manual_seed(5)
    settings = config(stage, zero_optimization=divided(stage) | zero)
    engine, *_ = zero_deepspeed.initialize(
        model=Branching(ways), training_data=Samples(), config=settings
    )
    return engine


def run(stage: int, ways: list[list[int]], zero: dict[str, Any]) -> tuple[Any, ...]:
    engine = branching_engine(stage, ways, **zero)
    train(engine, 6)
    result = fingerprint(engine)
    engine.module.eval()
    with torch.no_grad():  # other ranks may leave out other layers here as well
        engine(torch.full((1, 1), dist.get_rank() / 100))
    engine.destroy()
    return result


EVERY = [0, 1, 2, 3, 4]
LEFT_OUT = [EVERY, [0, 2, 4], [1, 3], []]
BACKWARDS = [[4, 2, 3, 1, 0], [4, 3, 1], [2]]
TWICE = [[0, 1, 0, 2, 3, 4], [0, 1, 0]]


@pytest.mark.parametrize("ways", [LEFT_OUT, [[4, 2, 3, 1, 0]], TWICE], ids=str)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.corners(stage=[3])
def test_ranks_that_leave_modules_out_train_to_the_same_bits_as_one_process(
    worlds: WorldPool, stage: int, ways: list[list[int]]
) -> None:
    (alone,) = worlds.run(1, run, 0, ways, {})
    assert worlds.run(2, run, stage, ways, {}) == [alone] * 2


@pytest.mark.parametrize(
    "zero",
    [{"stage3_prefetch_bucket_size": 0}, {"stage3_prefetch_bucket_size": 5e7}],
    ids=["on demand", "all at once"],
)
def test_how_far_ahead_parameters_are_gathered_changes_no_result(
    worlds: WorldPool, zero: dict[str, Any]
) -> None:
    (alone,) = worlds.run(1, run, 0, LEFT_OUT, {})
    assert worlds.run(3, run, 3, LEFT_OUT, zero) == [alone] * 3


_LAST: list[Engine] = []
"""Kept, so that a rank does not leave before the others have been told."""


@looking_often()
def diverge(stage: int, how: str) -> str:
    """What a rank is told that does what the others do not, before its group loses patience."""
    engine = branching_engine(stage, BACKWARDS if how == "order" else [EVERY])
    _LAST[:] = [engine]
    began = time.monotonic()
    try:
        if how == "call":
            train(engine, 1)
            if dist.get_rank() == 0:
                engine.weight_hash()
        train(engine, 20)
    except Diverged as error:
        assert time.monotonic() - began < GROUP_TIMEOUT_S
        return str(error)
    except PeerLost as error:  # the other rank has said it, and ended
        return f"PeerLost: {error}"
    return "trained"


def test_ranks_that_call_different_things_are_told_who_waits_for_what(worlds: WorldPool) -> None:
    for told in worlds.run(2, diverge, 3, "call"):
        assert "rank 0 waits for weights of layers.0, which rank 1 has not begun" in told
        assert "rank 1 waits for parameters of root" in told


@pytest.mark.full
def test_ranks_that_run_modules_in_different_orders_are_told_the_modules(
    worlds: WorldPool,
) -> None:
    for told in worlds.run(2, diverge, 3, "order"):
        assert "waits for parameters of layers." in told
