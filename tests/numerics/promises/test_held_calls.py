"""What a loop does beside the optimizer of a run: averages, scalers, schedulers, optimizers."""

from __future__ import annotations

import io
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import zero_torch
from tests.numerics.promises.back_ends import IN, MICROBATCHES, Net, data
from tests.numerics.promises.test_schedulers import sequence
from tests.support import stock
from tests.support.world import WorldPool, one_result
from zero_checkpoint import weight_hash
from zero_contract.errors import ZeroError


def protected(back_end: str, optimizer: Callable[[Any], Optimizer], **given: Any) -> Any:
    """A model, its optimizer, and a run of both."""
    torch.manual_seed(0)
    net = Net()
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    back_end = back_end if torch.distributed.get_world_size() > 1 else "plain"
    model = stock.wrap(net, back_end)
    stepped = optimizer(model.parameters())
    run = zero_torch.protect(
        model,
        stepped,
        DataLoader(data(), batch_size=2, shuffle=True),
        microbatches=MICROBATCHES,
        stateful={"average": average},
    )
    return model, stepped, run, average


def averaged(turn: str) -> str:
    """An average that a loop updates for every batch, as a loop of stock PyTorch does."""
    model, optimizer, run, average = protected("ddp", SGD)
    for (batch,) in run.loader:
        if turn == "of the script":
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            run.backward(model(batch))
            run.step()
        average.update_parameters(getattr(model, "module", model))
    assert int(average.n_averaged) == run.global_step == 3
    return weight_hash(average.module.named_parameters())


@pytest.mark.parametrize("turn", ["of the script", "of the run"])
@pytest.mark.corners(turn=["of the script"])
def test_an_average_of_the_weights_takes_each_step_once_at_every_world_size(
    worlds: WorldPool, turn: str
) -> None:
    one_result(worlds, averaged, turn, sizes=(1, 2, 3))


def copied(by_file: bool) -> list[Any]:
    """What copies of a schedule and an average do, and what becomes of their originals."""

    def copy(each: Any) -> Any:
        if not by_file:
            return deepcopy(each)
        file = io.BytesIO()
        torch.save(each, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    torch.manual_seed(0)
    model = Net()
    optimizer, average = SGD(model.parameters(), lr=1.0), AveragedModel(model)
    schedule = schedulers.ExponentialLR(optimizer, 0.5)
    loader = DataLoader(data(), batch_size=2)
    given: Any = {"scheduler": schedule, "stateful": {"average": average}}
    run = zero_torch.protect(model, optimizer, loader, microbatches=MICROBATCHES, **given)
    ahead, other = copy(schedule), copy(average)
    rates = []
    for _ in range(3):
        ahead.step()
        other.update_parameters(model)
        rates += ahead.get_last_lr()
    found = [rates, int(other.n_averaged), type(ahead), type(other)]
    run.close()
    return [*found, schedule.get_last_lr(), int(average.n_averaged)]


@pytest.mark.parametrize("by_file", [False, True])
def test_a_copy_of_a_schedule_or_an_average_acts_by_itself(
    worlds: WorldPool, by_file: bool
) -> None:
    """As of one that a script steps to draw the rates that are to come."""
    own = [[0.5, 0.25, 0.125], 3, schedulers.ExponentialLR, AveragedModel]
    assert worlds.run(1, copied, by_file) == [[*own, [1.0], 0]]


class Within(Optimizer):
    """Has another optimizer inside, which steps."""

    def __init__(self, parameters: Any) -> None:
        self.inside = SGD(parameters, lr=0.1)
        super().__init__(self.inside.param_groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inside.step()


def first_step(back_end: str, made: Any, others: Callable[[nn.Module], list[Optimizer]]) -> str:
    """Whether a loop can step other optimizers, too; returns what it is told."""
    model, optimizer, run, _ = protected(back_end, made)
    beside = others(model)
    try:
        for (batch,) in run.loader:
            model(batch).backward()
            for each in (*beside, optimizer):
                each.step()
    except ZeroError as error:
        return str(error)
    assert run.global_step == 3
    return ""


def of_all(model: nn.Module) -> list[Optimizer]:
    return [AdamW(model.parameters())]


def of_the_last(model: nn.Module) -> list[Optimizer]:
    return [SGD([*model.parameters()][-1:], lr=0.1)]


def of_another_model(model: nn.Module) -> list[Optimizer]:
    other = nn.Linear(IN, 1)
    other(torch.ones(IN)).sum().backward()
    return [SGD(other.parameters(), lr=0.1)]


@pytest.mark.parametrize("back_end", ["plain", "ddp"])
@pytest.mark.parametrize("others", [of_all, of_the_last])
@pytest.mark.corners(back_end=["ddp"], others=[of_the_last])
def test_a_step_of_another_optimizer_of_the_same_parameters_is_refused_by_name(
    worlds: WorldPool, back_end: str, others: Any
) -> None:
    world = 1 if back_end == "plain" else 2
    (found, *_) = worlds.run(world, first_step, back_end, SGD, others)
    name = type(others(nn.Linear(1, 1))[0]).__name__
    assert f"this {name} steps parameters that the SGD of a run has" in found
    assert "in param groups" in found


@pytest.mark.parametrize("made", [SGD, Within])
def test_an_optimizer_of_others_and_one_inside_of_the_optimizer_step_as_ever(
    worlds: WorldPool, made: Any
) -> None:
    assert worlds.run(1, first_step, "plain", made, of_another_model) == [""]


# ---- loss scalers and schedulers that the run does not have ----


def scales(optimizer: Optimizer, **given: Any) -> Callable[[torch.Tensor], None]:
    """A loop with a scaler, as in torch's documentation."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, **given)

    def act(loss: torch.Tensor) -> None:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return act


def unscales(optimizer: Optimizer) -> Callable[[torch.Tensor], None]:
    """A loop that unscales to clip, and steps by itself."""
    scaler = torch.amp.GradScaler("cpu")

    def act(loss: torch.Tensor) -> None:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer=optimizer)
        optimizer.step()

    return act


def schedules(optimizer: Optimizer, made: Callable[[Any], Any]) -> Callable[[torch.Tensor], None]:
    """A loop that steps a scheduler for every batch."""
    scheduler = made(optimizer)

    def act(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        scheduler.step(*[1.0] * isinstance(scheduler, schedulers.ReduceLROnPlateau))

    return act


class Rates(schedulers.LRScheduler):
    """A schedule of the script's own, with a step of its own that sets nothing yet."""

    def step(self, epoch: int | None = None) -> None:
        """Count."""
        self.last_epoch += 1


STEPPED: dict[str, Callable[[Any], Any]] = {
    "CosineAnnealingWarmRestarts": partial(schedulers.CosineAnnealingWarmRestarts, T_0=20),
    "Rates": Rates,
    "ReduceLROnPlateau": schedulers.ReduceLROnPlateau,
    "SequentialLR": sequence,
    "StepLR": partial(schedulers.StepLR, step_size=20),
}
BESIDE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "scales": (scales, "this GradScaler acts on gradients that the SGD of a run has"),
    "unscales": (unscales, "this GradScaler acts on gradients that the SGD of a run has"),
    **{
        name: (partial(schedules, made=made), f"this {name} was stepped in the middle of a step")
        for name, made in STEPPED.items()
    },
}


def beside(make: Callable[[Optimizer], Any], back_end: str) -> str:
    """What a loop is told that acts so for every batch."""
    model, optimizer, run, _ = protected(back_end, SGD)
    act = make(optimizer)
    try:
        for (batch,) in run.loader:
            act(model(batch))
    except ZeroError as error:
        return str(error)
    assert run.global_step == 3
    return ""


@pytest.mark.parametrize("what", BESIDE)
@pytest.mark.corners(what=["scales", "StepLR"])
def test_a_scaler_or_scheduler_that_the_run_does_not_hold_is_refused_by_name(
    worlds: WorldPool, what: str
) -> None:
    make, expected = BESIDE[what]
    for told in (*worlds.run(1, beside, make, "plain"), *worlds.run(2, beside, make, "ddp")):
        assert told.startswith(expected), told


def test_a_scaler_that_is_off_changes_nothing(worlds: WorldPool) -> None:
    assert worlds.run(1, beside, partial(scales, enabled=False), "plain") == [""]


def epochs_of_its_own() -> list[Any]:
    """What a scheduler in the hands of the script may do, and one of the run may not."""
    torch.manual_seed(0)
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    held = schedulers.CosineAnnealingWarmRestarts(optimizer, T_0=2)
    own = schedulers.StepLR(optimizer, step_size=1)
    loader = DataLoader(data(), batch_size=2)
    run = zero_torch.protect(model, optimizer, loader, microbatches=MICROBATCHES, scheduler=held)
    protected("plain", SGD)  # a second run takes nothing from the first one
    told, steps = "", 0
    for (batch,) in run.loader:
        run.backward(model(batch))
        held.step()
        if run.step():
            own.step()
            steps += 1
            try:
                held.step(run.global_step + 0.5)
            except ZeroError as error:
                told = str(error)
    own.step()
    return [told, steps, own.last_epoch]


def test_an_epoch_that_is_given_to_the_scheduler_of_a_run_is_refused(worlds: WorldPool) -> None:
    ((told, steps, stepped),) = worlds.run(1, epochs_of_its_own)
    assert told.startswith("CosineAnnealingWarmRestarts.step() got an argument")
    assert (steps, stepped) == (3, 4)
