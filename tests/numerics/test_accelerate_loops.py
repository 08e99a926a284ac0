"""Loops of accelerate, by the plug-in, train what a plain loop of a run trains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zero_torch
from tests.support.world import WorldPool

MICROBATCHES, EPOCHS = 3, 2
"""3 steps in an epoch, the last one of 2 micro-batches."""


def given() -> tuple[nn.Sequential, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    inputs = torch.randn(16, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, 2)


def one_ahead(batches: Iterable[Any]) -> Iterator[Any]:
    """Draws a batch before the one before it is run, as prefetchers do."""
    before = None
    for batch in chain(batches, [None]):
        if before is not None:
            yield before
        before = batch


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def plain(clipped: list[list[int]]) -> tuple[int, str]:
    model, optimizer, loader = given()
    run = zero_torch.protect(model, optimizer, loader, microbatches=MICROBATCHES)
    for _ in range(EPOCHS):
        for batch in run.loader:
            run.backward(loss_of(model, batch))
            if run.last:
                for layers in clipped:
                    some = [p for layer in layers for p in model[layer].parameters()]
                    nn.utils.clip_grad_norm_(some, 0.1)
            run.step()
    return run.global_step, run.weight_hash()


def by_accelerate(clipped: list[list[int]], ahead: bool = False) -> tuple[int, str]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from zero_libraries.accelerate import protect

    accelerator, (net, optimizer, loader) = Accelerator(cpu=True), given()
    run, model, optimizer, loader, _ = protect(
        accelerator, net, optimizer, loader, microbatches=MICROBATCHES
    )
    for _ in range(EPOCHS):
        for batch in one_ahead(loader) if ahead else loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                if accelerator.sync_gradients:
                    for layers in clipped:
                        some = [p for layer in layers for p in net[layer].parameters()]
                        accelerator.clip_grad_norm_(some, 0.1)
                optimizer.step()
                optimizer.zero_grad()
    AcceleratorState._reset_state(True)  # for what this process runs next
    return run.global_step, run.weight_hash()


@pytest.mark.parametrize("clipped", [[[0, 2]], [[0]], [[0], [2]]])
def test_the_parameters_that_are_given_are_clipped(
    worlds: WorldPool, clipped: list[list[int]]
) -> None:
    pytest.importorskip("accelerate")
    assert worlds.run(1, by_accelerate, clipped) == worlds.run(1, plain, clipped)


def test_a_loop_of_accelerate_may_draw_a_batch_ahead(worlds: WorldPool) -> None:
    pytest.importorskip("accelerate")
    assert worlds.run(1, by_accelerate, [], True) == worlds.run(1, plain, [])
