"""Stock PyTorch under an agent: it leaves with a save, goes on from memory, and sees lost peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import zero_torch
from tests.numerics.test_stock_torch import STEPS, batches, dataset, protected, trained
from tests.support.inside import persistence_of
from tests.support.world import WorldPool


def train(model: Any, run: zero_torch.Run, until: int) -> None:
    for tokens in batches(run, until):
        run.backward(model(tokens))
        run.step()


def resumed(wrapper: str, root: str) -> tuple[int, str]:
    model, _, run = protected(wrapper, seed=5)
    run.load(f"{root}/checkpoints")
    begun = run.global_step
    train(model, run, STEPS)
    run.close()
    return begun, run.weight_hash()


def evaluated_and_saved(root: str, wrapper: str) -> str:
    """A forward without a backward leaves the root module of FSDP2 gathered."""
    model, _, run = protected(wrapper)
    train(model, run, 3)
    model.eval()
    with torch.no_grad():
        model(dataset()[:2][0])
    model.train()
    weights = run.weight_hash()
    run.save(f"{root}/checkpoints")
    run.close()
    return weights


def test_a_save_after_an_evaluation_has_the_state_of_all_parameters(
    worlds: WorldPool, tmp_path: Path
) -> None:
    worlds.run(2, evaluated_and_saved, str(tmp_path), "fsdp2")
    (expected, *_) = worlds.run(1, trained, "plain")
    assert worlds.run(1, resumed, "plain", str(tmp_path)) == [(3, expected[0])]


def saved_twice(root: str, wrapper: str) -> tuple[str, bool]:
    model, _, run = protected(wrapper)
    layouts = []
    for step in (2, 3):
        train(model, run, step)
        run.save(f"{root}/checkpoints")
        layouts.append(persistence_of(run).saver._layout)
    run.close()
    return run.weight_hash(), layouts[0] is layouts[1]


def test_a_second_save_has_the_layout_of_the_first_and_the_new_weights(
    worlds: WorldPool, tmp_path: Path
) -> None:
    found = worlds.run(2, saved_twice, str(tmp_path), "fsdp2")
    assert found == [(*worlds.run(1, weights_of, str(tmp_path)), True)] * 2


def weights_of(root: str) -> str:
    _, _, run = protected("plain", seed=5)
    run.load(f"{root}/checkpoints")
    weights = run.weight_hash()
    run.close()
    return weights
