"""Habits of scripts, in a table: each has torch's bits at every place, or is refused by name."""

from __future__ import annotations

import copy
import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim import Optimizer
from torch.utils.data import Dataset

from tests.numerics.promises.back_ends import (
    IN,
    Net,
    Place,
    Recipe,
    by_torch_alone,
    data,
    everywhere,
)
from tests.support.world import WorldPool

PLAIN: Place = ("plain", 1)
FEW: list[Place] = [PLAIN, ("ddp", 2), ("fsdp2", 2), ("stage0", 2), ("stage3", 2)]
OTHERS: list[Place] = [PLAIN, ("fsdp2", 1), ("stage0", 2), ("stage1", 1), ("stage2", 3)]
STOCK = ("plain", "ddp", "fsdp2")
STAGES = ("stage0", "stage1", "stage2", "stage3")


def sgd(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})


def adam(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, **options})


def inner(model: Any) -> Any:
    """The script's own module."""
    return getattr(model, "module", model)


# ---- the process ----


@contextmanager
def wide() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def strict() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Narrow(Net):
    """Of 32 bits, whatever the default is."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


# ---- evaluations ----


def evaluate(model: Any, _: Any, how: Any = torch.no_grad) -> None:
    model.eval()
    with how():
        model(torch.ones(3, IN))
    model.train()


# ---- modules ----


class Weighted(Net):
    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "old":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                nn.utils.weight_norm(self.up)
        elif kind == "orthogonal":
            parametrizations.orthogonal(self.down)
        else:
            parametrizations.weight_norm(self.up)


class Twins(nn.Module):
    """Layers of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value, self.out = (nn.Linear(IN, IN) for _ in range(4))
        self.down = nn.Linear(IN, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.query(x)) * 2 + self.key(x)
        x = self.out(torch.tanh(self.value(x)))
        return (self.down(x) - 1).square().mean()


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.relu_()
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient.mul_(x > 0)


class WithInPlace(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.down(InPlace.apply(self.norm(self.up(x)).clone()))
        x = torch.tanh(self.conv(x.unsqueeze(1))).flatten(1)
        return (self.head(x) - 1.0).square().mean()


@dataclass
class Output:
    loss: Tensor
    other: Tensor


class Box:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Returns(Net):
    def __init__(self, how: Any) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Any:
        loss = super().forward(x)
        return self.how(loss)


def as_output(loss: Tensor) -> Output:
    return Output(loss, loss.detach())


def unpacked(model: Any, x: Tensor) -> Tensor:
    return model(x).loss


class Residual(Net):
    """Returns what the script makes a loss of."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(torch.tanh(self.norm(self.up(x))))
        return self.head(torch.tanh(self.conv(x.unsqueeze(1))).flatten(1))


def of_residual(model: Any, x: Tensor) -> Tensor:
    return (model(x) - 1).square().mean()


def twice_called(model: Any, x: Tensor) -> Tensor:
    return (model(x) - 1).square().mean() + (model(x / 2) + 1).square().mean()


def penalty_on_input(model: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return (y - 1).square().mean() + slope.square().sum()


def penalty_on_gradients(model: Any, x: Tensor) -> Tensor:
    loss = (model(x) - 1).square().mean()
    trained = [p for p in model.parameters() if p.requires_grad]
    slopes = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)
    return loss + 0.1 * sum(s.square().sum() for s in slopes if s is not None)


def weight_penalty(model: Any, x: Tensor) -> Tensor:
    return (model(x) - 1).square().mean() + 0.1 * sum(p.square().sum() for p in model.parameters())


def bypassing(model: Any, x: Tensor) -> Tensor:
    return (inner(model)(x) - 1).square().mean()


def functional(model: Any, x: Tensor) -> Tensor:
    weights = dict(inner(model).named_parameters())
    return (torch.func.functional_call(inner(model), weights, (x,)) - 1).square().mean()


def per_sample(model: Any, x: Tensor) -> Tensor:
    weights = dict(inner(model).named_parameters())

    def one(sample: Tensor) -> Tensor:
        y = torch.func.functional_call(inner(model), weights, (sample[None],))
        return (y - 1).square().mean()

    return torch.func.vmap(one)(x).mean()


def retained(model: Any, x: Tensor) -> Tensor:
    y = model(x)
    y.retain_grad()
    return y


def anomalous() -> Any:
    return torch.autograd.detect_anomaly(check_nan=True)


# ---- what is done to a module in the middle of a run ----


def at(step: int, do: Callable[[Any, Any], None]) -> Any:
    return partial(_at, step, do)


def _at(when: int, do: Any, model: Any, optimizer: Optimizer, step: int) -> None:
    if step == when:
        do(inner(model), optimizer)


def new_head(model: Any, optimizer: Optimizer) -> None:
    new_head_alone(model, optimizer)
    optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 0.02})


def new_head_alone(model: Any, optimizer: Optimizer) -> None:
    model.head = nn.Linear(15, 1)
    with torch.no_grad():
        for p in model.head.parameters():
            p.fill_(0.1)


def foreign_group(model: Any, optimizer: Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def parametrizes(model: Any, optimizer: Optimizer) -> None:
    parametrizations.weight_norm(model.up)


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def parametrizes_plainly(model: Any, optimizer: Optimizer) -> None:
    parametrize.register_parametrization(model.up, "weight", Doubles())


def ties(model: Any, optimizer: Optimizer) -> None:
    model.key.weight = model.query.weight


def tied_late(model: Any) -> Optimizer:
    """After it was wrapped, before the optimizer is made."""
    own = inner(model)
    own.key.weight = own.query.weight
    return sgd(model)


def tied_after_optimizer(model: Any) -> Optimizer:
    optimizer = sgd(model)
    inner(model).key.weight = inner(model).query.weight
    return optimizer


def loads_state(model: Any, optimizer: Optimizer) -> None:
    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})


def assigned_state(model: Any, optimizer: Optimizer) -> None:
    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()}, assign=True)


def moves(model: Any, optimizer: Optimizer) -> None:
    model.to(torch.float64).to(torch.float32)


# ---- optimizers ----


def grouped(model: Any) -> Optimizer:
    named = list(model.named_parameters())
    decayed = [p for n, p in named if "weight" in n]
    others = [p for n, p in named if "weight" not in n]
    return torch.optim.AdamW(
        [
            {"params": decayed, "betas": (0.8, 0.95), "weight_decay": 0.3, "eps": 1e-6},
            {"params": others, "betas": (0.9, 0.99), "amsgrad": True, "maximize": True},
        ],
        lr=0.01,
    )


def grows(model: Any) -> Optimizer:
    params = list(model.parameters())
    for p in params[6:]:
        p.requires_grad_(False)
    return torch.optim.SGD(params[:6], lr=0.05, momentum=0.9)


def grow(model: Any, optimizer: Optimizer) -> None:
    params = [p for p in model.parameters() if not p.requires_grad]
    for p in params:
        p.requires_grad_()
    optimizer.add_param_group({"params": params, "lr": 0.01})


def clears_state(model: Any, optimizer: Optimizer) -> None:
    optimizer.state.clear()


def zeroes_state(model: Any, optimizer: Optimizer) -> None:
    for values in optimizer.state.values():
        for value in values.values():
            if isinstance(value, Tensor) and value.dim():
                value.zero_()


def reloads_state(model: Any, optimizer: Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def edits_groups(model: Any, optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
        group["weight_decay"] = 0.1


def new_dictionaries(model: Any, optimizer: Optimizer) -> None:
    optimizer.param_groups = [dict(g) for g in optimizer.param_groups]


def reversed_groups(model: Any, optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["params"].reverse()


# ---- hooks ----


def hooked(how: Any, model: Any) -> Optimizer:
    for p in model.parameters():
        how(p)
    return sgd(model)


def clamps(p: Any) -> None:
    p.register_hook(lambda g: g.clamp(-0.01, 0.01))


def clamp_gradient(p: Any) -> None:
    p.grad.clamp_(-0.01, 0.01)


def clamps_after(p: Any) -> None:
    p.register_post_accumulate_grad_hook(clamp_gradient)


def takes_away(p: Any) -> None:
    p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))


def clamped_between(model: Any, optimizer: Optimizer) -> None:
    torch.nn.utils.clip_grad_value_(inner(model).parameters(), 0.01)


def by_step_hook(model: Any) -> Optimizer:
    optimizer = sgd(model)

    def clamp(*_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.clamp_(-0.01, 0.01)

    optimizer.register_step_pre_hook(clamp)
    return optimizer


def by_module_hook(model: Any) -> Optimizer:
    inner(model).down.register_full_backward_hook(lambda m, i, o: (i[0] * 0.5,))
    return sgd(model)


def zeroed(to_none: bool, model: Any, x: Tensor) -> Tensor:
    inner(model).zero_grad(set_to_none=to_none)
    return model(x)


# ---- data ----


class Noise(Dataset[Any]):
    def __init__(self) -> None:
        self.samples = data()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, at: int) -> Any:
        return (self.samples[at][0] + np.random.rand() + random.random() + torch.rand(()),)


def seeds_numpy(worker: int) -> None:
    np.random.seed(worker + os.getpid() % 1000)
    random.seed(worker)
    torch.manual_seed(worker)


class Told(Noise):
    """Its samples depend on what the script says before each loop, such as by `set_epoch`."""

    step = 0

    def __getitem__(self, at: int) -> Any:
        return (self.samples[at][0] + Told.step,)


def tells(_: nn.Module, __: Optimizer, step: int) -> None:
    Told.step = step


LOADING = {
    "persistent_workers": True,
    "prefetch_factor": 3,
    "worker_init_fn": seeds_numpy,
}


HABITS: dict[str, Recipe] = {
    # the process
    "float64 is the default": Recipe(model=Narrow, within=wide),
    "float64 is the default, clipped": Recipe(model=Narrow, within=wide, max_norm=100.0),
    "deterministic algorithms": Recipe(within=strict),
    "anomalies are detected": Recipe(within=anomalous),
    # evaluations
    "evaluates between micro-steps": Recipe(between=evaluate),
    "infers between micro-steps": Recipe(between=partial(evaluate, how=torch.inference_mode)),
    # modules
    "weight norm": Recipe(model=partial(Weighted, "new")),
    "weight norm of old": Recipe(model=partial(Weighted, "old")),
    "a function in place": Recipe(model=WithInPlace),
    "returns a dataclass": Recipe(model=partial(Returns, as_output), loss=unpacked),
    "returns an object": Recipe(model=partial(Returns, Box), loss=unpacked),
    "calls the model twice": Recipe(model=Residual, loss=twice_called),
    "twice in autocast": Recipe(model=Residual, loss=twice_called, precision="autocast"),
    "a penalty on slopes": Recipe(model=Residual, loss=penalty_on_input),
    "a penalty on gradients": Recipe(model=Residual, loss=penalty_on_gradients),
    "a penalty on weights": Recipe(model=Residual, loss=weight_penalty),
    "goes around the wrapper": Recipe(model=Residual, loss=bypassing),
    "a functional call": Recipe(model=Residual, loss=functional),
    "by sample": Recipe(model=Residual, loss=per_sample),
    "retains a gradient": Recipe(loss=retained),
    # in the middle of a run
    "a new head": Recipe(before=at(1, new_head)),
    "a new head that is not trained": Recipe(before=at(1, new_head_alone)),
    "a foreign group": Recipe(before=at(1, foreign_group)),
    "parametrizes": Recipe(before=at(1, parametrizes)),
    "parametrizes plainly": Recipe(before=at(1, parametrizes_plainly)),
    "ties": Recipe(model=Twins, before=at(1, ties)),
    "tied late": Recipe(optimizer=tied_late, model=Twins),
    "tied after the optimizer": Recipe(optimizer=tied_after_optimizer, model=Twins),
    "loads a state": Recipe(before=at(1, loads_state)),
    "assigns a state": Recipe(before=at(1, assigned_state)),
    "moves there and back": Recipe(before=at(1, moves)),
    # optimizers
    "groups": Recipe(optimizer=grouped),
    "grows": Recipe(optimizer=grows, before=at(1, grow)),
    "clears the state": Recipe(optimizer=adam, before=at(1, clears_state)),
    "zeroes the state": Recipe(optimizer=adam, before=at(1, zeroes_state)),
    "reloads the state": Recipe(optimizer=adam, before=at(1, reloads_state)),
    "edits groups": Recipe(optimizer=adam, before=at(1, edits_groups)),
    "new dictionaries": Recipe(optimizer=adam, before=at(1, new_dictionaries)),
    "reverses groups": Recipe(optimizer=adam, before=at(1, reversed_groups)),
    # hooks
    "a gradient hook": Recipe(optimizer=partial(hooked, clamps)),
    "a hook behind": Recipe(optimizer=partial(hooked, clamps_after)),
    "a hook that takes away": Recipe(optimizer=partial(hooked, takes_away)),
    "clamps between": Recipe(between=clamped_between),
    "a step hook": Recipe(optimizer=by_step_hook),
    "a module hook": Recipe(optimizer=by_module_hook),
    "zeroes first": Recipe(loss=partial(zeroed, True), own_loop=True),
    "zeroes in place": Recipe(loss=partial(zeroed, False), own_loop=True),
    # data
    "loading processes": Recipe(data=Noise, of_loader=LOADING, workers=2),
    "tells the data the step": Recipe(data=Told, before=tells, workers=2),
}
NOT_IN_TORCH = {
    "returns an object": {"ddp"},
    "a penalty on slopes": {"fsdp2"},
    "a penalty on weights": {"fsdp2"},
    "clamps between": {*STAGES},
}
"""What torch itself refuses there, or, of `.grad` under the engine, there is nothing to clamp."""
AROUND = "and not its .module"
EXCHANGED = "another parameter than at"
FOREIGN = "parameters that are not the model's"
GROUPS = "what is added later is not trained"
HOOKED = "has a gradient hook of the script"
NOT_GATHERED = "fully_shard does not know the parameter at"
NOT_REDUCED = "DistributedDataParallel does not see the gradient of"
TAKEN = "has taken the gradient of"
REFUSED: dict[str, dict[str, str]] = {
    "a penalty on gradients": {"fsdp2": "a backward with create_graph=True"},
    "goes around the wrapper": {"ddp": AROUND},
    "a functional call": {"ddp": AROUND},
    "by sample": {"ddp": AROUND},
    "a new head": {**dict.fromkeys(STOCK, EXCHANGED), **dict.fromkeys(STAGES, GROUPS)},
    "a new head that is not trained": dict.fromkeys((*STOCK, *STAGES), EXCHANGED),
    "a foreign group": {**dict.fromkeys(STOCK, FOREIGN), **dict.fromkeys(STAGES, GROUPS)},
    "parametrizes": {**dict.fromkeys((*STOCK, *STAGES[:3]), EXCHANGED)},
    "parametrizes plainly": {"ddp": NOT_REDUCED, "fsdp2": NOT_GATHERED},
    "ties": dict.fromkeys((*STOCK, *STAGES), EXCHANGED),
    "tied late": {"ddp": NOT_REDUCED, "fsdp2": NOT_GATHERED},
    "tied after the optimizer": {
        **dict.fromkeys(STOCK, FOREIGN),
        **dict.fromkeys(STAGES, "is not one of the model's"),
    },
    "loads a state": {"stage3": "load_state_dict() at stage 3"},
    "assigns a state": {
        **dict.fromkeys((*STOCK, *STAGES), EXCHANGED),
        "stage3": "load_state_dict() at stage 3",
    },
    "moves there and back": {
        "ddp": "DistributedDataParallel has not reduced",
        **dict.fromkeys(STAGES[:3], "has other memory than at initialize()"),
        "stage3": "up.weight is divided",
    },
    "grows": dict.fromkeys(STAGES, GROUPS),
    "a gradient hook": {"fsdp2": HOOKED},
    "a hook behind": {"fsdp2": HOOKED},
    "a hook that takes away": {**dict.fromkeys((*STOCK, *STAGES), TAKEN), "fsdp2": HOOKED},
}
"""What is said instead."""
OTHER_NAMES = {"parametrizes plainly"}
"""The engine keeps the names of parameters that a hash has."""
OTHER_NUMBERS = {"loading processes", "float64 is the default", "float64 is the default, clipped"}
"""Torch alone seeds nothing, or has other data."""


@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("chosen", [FEW, OTHERS], ids=["few", "others"])
@pytest.mark.corners(
    chosen=[FEW],
    habit=[
        "infers between micro-steps",
        "twice in autocast",
        "a new head",
        "tied late",
        "a hook that takes away",
    ],
)
def test_a_habit_has_the_bits_of_torch_alone_or_is_refused_by_name(
    worlds: WorldPool, tmp_path: Path, habit: str, chosen: list[Place]
) -> None:
    recipe = HABITS[habit]
    if recipe.optimizer is Recipe().optimizer:
        recipe = replace(recipe, optimizer=sgd)
    absent, refused = NOT_IN_TORCH.get(habit, ()), REFUSED.get(habit, {})
    if habit == "parametrizes":  # of stage 3 torch says it by itself
        absent = {"stage3"}
    places = [place for place in chosen if place[0] not in absent]
    found = {}
    for place in places:  # each goes on from its own checkpoint
        found |= everywhere(worlds, recipe, tmp_path / str(place), [place])
    expected = found["plain", 1]
    if habit not in OTHER_NUMBERS and "plain" not in refused:
        assert [expected] == worlds.run(1, by_torch_alone, recipe)
    for (back_end, world), hashes in found.items():
        if back_end in refused:
            assert refused[back_end] in hashes[-1], (back_end, world)
        elif back_end in STAGES and habit in OTHER_NAMES:
            assert hashes == found["stage0", 2]
        else:
            assert (hashes, len(hashes)) == (expected, 4), (back_end, world)
