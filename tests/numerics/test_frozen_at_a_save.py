"""A continued run is the undisturbed one, whatever was frozen or unused at the save and later."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zero_checkpoint
import zero_deepspeed
import zero_torch
from tests.support.world import WorldPool
from zero_checkpoint.errors import ModelMismatch

PATTERNS = ["", "b.", "c.", "b. c.", "a.bias b. c."]
"""Beginnings of the names of what is frozen."""
SAVED_AT = 2


Case = tuple[str, str, str]
"""Patterns before the save and behind it, and the layer that a step leaves out."""


class Layers(nn.Module):
    """Layers of which any may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        for name in "abcd":
            setattr(self, name, nn.Linear(4, 4))

    def forward(self, x: Tensor, without: str = "") -> Tensor:
        for name in "abcd":
            x = x if name == without else torch.tanh(getattr(self, name)(x))
        return x.square().mean()


def freeze(model: nn.Module, pattern: str) -> None:
    beginnings = tuple(pattern.split())
    for name, parameter in model.named_parameters():
        own = name.removeprefix("module.")
        parameter.requires_grad_(not (bool(beginnings) and own.startswith(beginnings)))


def optimizer_of(model: nn.Module, *, fresh: bool = False) -> torch.optim.Optimizer:
    """Groups of a and d, of b, of c; after a restart with options that the checkpoint replaces."""
    named = [(n.removeprefix("module."), p) for n, p in model.named_parameters()]
    groups = [
        {"params": [p for n, p in named if n[0] in names], "lr": lr, "weight_decay": lr * 3}
        for names, lr in (("ad", 0.02), ("b", 0.03), ("c", 0.05))
    ]
    if fresh:
        for group in groups:
            group |= {"lr": 1.0, "weight_decay": 0.0}
    return torch.optim.AdamW(groups)


def batch(step: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: Any, steps: range, pattern: str, *, skips: str) -> None:
    freeze(model, pattern)
    for step in steps:
        optimizer.zero_grad()
        model(batch(step), without=skips if step == 1 else "").backward()
        optimizer.step()


def undisturbed(before: str, after: str, skips: str) -> str:
    """One plain process: all trained, then frozen, saved, frozen otherwise, and all trained."""
    model = Layers()
    optimizer = optimizer_of(model)
    train(model, optimizer, range(1), "", skips=skips)
    train(model, optimizer, range(1, SAVED_AT), before, skips=skips)
    train(model, optimizer, range(SAVED_AT, 4), after, skips=skips)
    train(model, optimizer, range(4, 5), "", skips=skips)
    return zero_checkpoint.weight_hash(model.named_parameters())


def wrap(wrapper: str, model: nn.Module) -> nn.Module:
    if wrapper == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    if wrapper == "fsdp2":
        for name in "abcd":
            fully_shard(getattr(model, name))
        fully_shard(model)
    return model


def save_frozen(root: str, wrapper: str, before: str, skips: str) -> None:
    model = wrap(wrapper, Layers())
    optimizer = optimizer_of(model)
    run = zero_torch.protect(model, optimizer)
    train(model, optimizer, range(1), "", skips=skips)
    train(model, optimizer, range(1, SAVED_AT), before, skips=skips)
    run.save(root)
    run.close()


def go_on(root: str, wrapper: str, before: str, after: str, skips: str) -> str:
    model = wrap(wrapper, Layers())
    optimizer = optimizer_of(model, fresh=True)
    run = zero_torch.protect(model, optimizer)
    freeze(model, before)
    run.load(root)
    assert run.global_step == SAVED_AT
    train(model, optimizer, range(SAVED_AT, 4), after, skips=skips)
    train(model, optimizer, range(4, 5), "", skips=skips)
    hashed = run.weight_hash()
    run.close()
    return hashed


CASES = [*itertools.product(PATTERNS, PATTERNS, ("", "d"))]
FEW = [
    (before, PATTERNS[3 * number % 5], skips)
    for number, before in enumerate(PATTERNS)
    for skips in ("", "d")
]
"""Each pattern before the save, and each behind it."""


def save_all(root: str, wrapper: str, cases: list[Case]) -> None:
    for number, (before, _, skips) in enumerate(cases):
        save_frozen(f"{root}/{number}", wrapper, before, skips)


def go_on_from_all(root: str, wrapper: str, cases: list[Case]) -> list[str]:
    return [go_on(f"{root}/{number}", wrapper, *case) for number, case in enumerate(cases)]


def all_undisturbed(cases: list[Case]) -> list[str]:
    return [undisturbed(*case) for case in cases]


@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "cases"),
    [
        pytest.param(("ddp", 2), ("fsdp2", 1), FEW, id="few"),
        pytest.param(("ddp", 2), ("fsdp2", 1), CASES, id="all", marks=pytest.mark.full),
        *(
            pytest.param(*pair, CASES, marks=pytest.mark.full)
            for pair in itertools.product(
                [("plain", 1), ("ddp", 1), ("fsdp2", 2)], [("plain", 1), ("ddp", 2), ("fsdp2", 2)]
            )
        ),
    ],
)
def test_a_continued_run_of_stock_torch_is_the_undisturbed_one(
    worlds: WorldPool,
    tmp_path: Path,
    saved_by: tuple[str, int],
    loaded_by: tuple[str, int],
    cases: list[Case],
) -> None:
    [expected] = worlds.run(1, all_undisturbed, cases)
    assert len(set(expected)) > len(PATTERNS)
    worlds.run(saved_by[1], save_all, str(tmp_path), saved_by[0], cases)
    found = worlds.run(loaded_by[1], go_on_from_all, str(tmp_path), loaded_by[0], cases)
    assert found == [expected] * loaded_by[1]


# ---- the engine, which trains what it was given ----


def engine_of(stage: int, pattern: str, *, fresh: bool = False) -> Any:
    model = Layers()
    freeze(model, pattern)
    settings = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
    }
    optimizer = optimizer_of(model, fresh=fresh)
    engine, *_ = zero_deepspeed.initialize(model=model, config=settings, optimizer=optimizer)
    return engine


def train_engine(engine: Any, until: int) -> None:
    while engine.global_steps < until:
        engine.backward(engine(batch(engine.global_steps)))
        engine.step()


def options(engine: Any) -> list[tuple[float, float]]:
    return [(group["lr"], group["weight_decay"]) for group in engine.optimizer.param_groups]


def save_engines(root: str, stage: int) -> list[str]:
    ends = []
    for pattern in PATTERNS:
        engine = engine_of(stage, pattern)
        train_engine(engine, SAVED_AT)
        engine.save_checkpoint(f"{root}/{pattern}")
        train_engine(engine, SAVED_AT + 2)
        ends.append(engine.weight_hash())
    return ends


def go_on_with_engines(root: str, stage: int) -> list[str]:
    """Equal patterns go on; any other is refused by name."""
    ends = []
    for before, after in itertools.product(PATTERNS, PATTERNS):
        engine = engine_of(stage, after, fresh=True)
        if before != after:
            with pytest.raises(ModelMismatch, match="trained where they are now frozen"):
                engine.load_checkpoint(f"{root}/{before}")
            continue
        engine.load_checkpoint(f"{root}/{before}")
        assert options(engine) == options(engine_of(stage, before))
        train_engine(engine, SAVED_AT + 2)
        ends.append(engine.weight_hash())
    return ends


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("worlds_of", [(1, 2), (2, 1)])
@pytest.mark.corners(stage=[3], worlds_of=[(2, 1)])
def test_a_continued_run_of_the_engine_is_the_undisturbed_one_or_refused(
    worlds: WorldPool, tmp_path: Path, stage: int, worlds_of: tuple[int, int]
) -> None:
    saved, loaded = worlds_of
    [ends, *_] = worlds.run(saved, save_engines, str(tmp_path), stage)
    assert worlds.run(loaded, go_on_with_engines, str(tmp_path), stage) == [ends] * loaded
