"""What scripts do out of habit, in pieces: modules, losses, optimizers, hooks, data."""

from __future__ import annotations

import copy
import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim import Optimizer
from torch.utils.data import Dataset

from tests.numerics.promises.back_ends import IN, Net, data


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
