"""Several runs of `zero_torch.protect` in one process: a GAN, and what two of them cannot share."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

import zero_engine
import zero_torch
from tests.support.saving import heard
from tests.support.stock import wrap
from tests.support.training import config
from tests.support.world import WorldPool
from zero_contract.errors import ConfigError
from zero_torch.run import Run

STEPS, SAVED_AT = 4, 2


def mlp(inputs: int, outputs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 9), nn.Tanh(), nn.Linear(9, outputs))


def loader() -> DataLoader[Any]:
    samples = torch.randn(29, 6, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(samples), batch_size=2, shuffle=True)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-2)


def run_of(model: nn.Module, **given: Any) -> Run:
    given = {"optimizer": adam(model), "loader": loader(), "microbatches": 5, **given}
    return zero_torch.protect(model, **given)


# ---- a GAN ----


def judged(scores: Tensor, real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


def train_gan(back_end: str, save: str = "", load: str = "") -> list[tuple[str, str]]:
    """The hashes of judge and generator after each step; `save` in the middle, or `load` it."""
    generator, judge = wrap(mlp(4, 6, 1), back_end), wrap(mlp(6, 1, 2), back_end)
    trained, judging = run_of(generator), run_of(judge)
    if load:
        trained.load(f"{load}/generator")
        judging.load(f"{load}/judge")
    hashes, until = list[tuple[str, str]](), SAVED_AT if save else STEPS
    while judging.global_step < until:
        for (real,), _ in zip(judging.loader, trained.loader, strict=True):
            fake = generator(torch.randn(len(real), 4))
            judging.backward(judged(judge(real), True) + judged(judge(fake.detach()), False))
            judge.requires_grad_(False)
            trained.backward(judged(judge(fake), True))
            judge.requires_grad_(True)
            if trained.step() & judging.step():
                hashes.append((judging.weight_hash(), trained.weight_hash()))
            if judging.global_step == until:
                break
    if save:
        trained.save(f"{save}/generator")
        judging.save(f"{save}/judge")
    trained.close()
    judging.close()
    return hashes


@pytest.mark.parametrize("back_end", ["ddp", "fsdp2"])
@pytest.mark.corners(back_end=["ddp"])
def test_a_gan_of_two_runs_has_the_same_bits_wherever_each_half_of_it_runs(
    worlds: WorldPool, tmp_path: Path, back_end: str
) -> None:
    (whole,) = worlds.run(1, train_gan, "plain")
    for world, then in ((3, 2), (2, 3)):
        root = f"{tmp_path}/{world}"
        halves = zip(
            worlds.run(world, train_gan, back_end, root),
            worlds.run(then, train_gan, back_end, "", root),
            strict=False,
        )
        assert [first + second for first, second in halves] == [whole] * 2


def told_of_steps(back_end: str, late: bool) -> list[str]:
    """What is said of a judge that steps before the generator's backward, or `late`, after it."""
    settings = config(
        1, train_batch_size=10, gradient_clipping=0, optimizer={"type": "Adam", "params": {}}
    )

    def made(model: nn.Module) -> tuple[Any, Any, Any]:
        if back_end == "engine":
            engine = zero_engine.initialize(model, training_data=loader().dataset, config=settings)
            return engine, engine, engine.training_dataloader
        wrapped = wrap(model, back_end)
        run = run_of(wrapped)
        return wrapped, run, run.loader

    with heard(logging.WARNING) as lines:
        generator, trained, noise = made(mlp(4, 6, 1))
        judge, judging, samples = made(mlp(6, 1, 2))
        for (real,), _ in zip(samples, noise, strict=True):
            fake = generator(torch.randn(len(real), 4))
            judging.backward(judged(judge(real), True) + judged(judge(fake.detach()), False))
            if not late:
                judging.step()
            module = judge.module if back_end == "engine" else judge
            module.requires_grad_(False)
            trained.backward(judged(judge(fake) if not late else module(fake), True))
            module.requires_grad_(True)
            if late:
                judging.step()
            trained.step()
    return [line.split(":")[0] for line in lines if "has stepped within" in line]


@pytest.mark.parametrize("back_end", ["ddp", "engine"])
@pytest.mark.corners(back_end=["ddp"])
def test_a_judge_that_steps_before_the_backward_through_it_is_named_at_every_world_size(
    worlds: WorldPool, back_end: str
) -> None:
    """Only the last micro-batches of the generator's step would have its new weights."""
    named = "training 1 of this process has stepped within a step of training 0, and computes with"
    for world in (1, 2):
        (lines, *_) = worlds.run(world, told_of_steps, back_end, False)
        assert [line[: len(named)] for line in lines] == [named]
    assert worlds.run(1, told_of_steps, back_end, True) == [[]]


# ---- what belongs to one run alone ----


def told(model: nn.Module, **given: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        run_of(model, **given)
    return str(refused.value)


def shared() -> dict[str, str]:
    """What a script is told that gives something of one run to another."""
    model, other = DistributedDataParallel(mlp(6, 1, 1)), DistributedDataParallel(mlp(6, 1, 1))
    optimizer, scaler = adam(model), torch.amp.GradScaler("cpu")
    scheduler = ExponentialLR(optimizer, 0.5)
    run = run_of(model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    run.close()
    compressed = DistributedDataParallel(mlp(6, 1, 1))
    compressed.register_comm_hook(None, lambda _, bucket: bucket.buffer())
    return {
        "model": told(model),
        "optimizer": told(DistributedDataParallel(model.module), optimizer=optimizer),
        "scheduler": told(other, scheduler=scheduler),
        "scaler": told(other, scaler=scaler),
        "hook": told(compressed),
        "second optimizer": told(other, stateful={"sgd": torch.optim.SGD(other.parameters())}),
    }


def test_what_one_run_has_is_given_to_no_other(worlds: WorldPool) -> None:
    (found,) = worlds.run(1, shared)
    for what in ("model", "optimizer", "scheduler", "scaler"):
        assert found.pop(what).startswith(f"the {what} is that of another run of this process: ")
    assert found.pop("hook").startswith("DistributedDataParallel has the communication hook ")
    assert "is an optimizer of parameters of the model" in found.pop("second optimizer")
    assert found == {}


def phases(anew: bool) -> str:
    """The hash after a second run, of the module of a first one or of a copy of its weights."""
    model: nn.Module = DistributedDataParallel(mlp(6, 1, 1))
    for number in range(2):
        run = run_of(model, microbatches=5 - number)
        for (batch,) in run.loader:
            run.backward(model(batch).square().mean())
            run.step(1.0)
        run.close()
        module = model.module
        if anew:
            module = mlp(6, 1, 5)
            module.load_state_dict(model.module.state_dict())
        model = DistributedDataParallel(module)
    return run.weight_hash()


@pytest.mark.full
def test_a_module_that_is_wrapped_anew_goes_on_in_a_second_run(worlds: WorldPool) -> None:
    (expected,) = worlds.run(1, phases, True)
    assert [*worlds.run(1, phases, False), *worlds.run(3, phases, False)] == [expected] * 4
