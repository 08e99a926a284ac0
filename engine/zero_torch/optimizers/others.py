"""What a script has beside a run, and would act on what the run has.

Owns the gates in front of other optimizers, of loss scalers and schedulers that the run does not
hold. Without them nothing would fail: each rank would act in each micro-batch, of which it has more
where there are fewer ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, Protocol
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zero_contract.errors import ZeroError

_OTHER = (
    "this {} steps parameters that the {} of a run has: its step does not wait for the last micro-"
    "batch, so each rank would train on its own gradients, and no checkpoint has its state. Give "
    "all parameters to the optimizer of zero_torch.protect(), in param groups; to go on with "
    "another one, begin a new run with the weights of this one"
)
_SCALER = (
    "this {} acts on gradients that the {} of a run has, and the run does not have it: it would "
    "act for every micro-batch, so gradients of several scales would be added, and which depends "
    "on the number of ranks; give it to zero_torch.protect(scaler=...), which holds it until the "
    "last micro-batch of a step"
)
_SCHEDULER = (
    "this {} was stepped in the middle of a step of the {} of a run, as by a loop that steps it "
    "for every batch: how often depends on the number of ranks; give it to zero_torch.protect("
    "scheduler=...), which holds it until the last micro-batch of a step, or step it where "
    "run.step() has returned True"
)


class Held(Protocol):
    """What a run holds of its script beside the optimizer."""

    def has(self, other: object) -> bool:
        """Whether the run has this loss scaler or scheduler, whose calls it holds."""

    def is_over(self) -> bool | None:
        """See `Steps`."""


# By reference: what a run holds has the optimizer, which would be kept by itself.
_of_runs: WeakKeyDictionary[Optimizer, ReferenceType[Held]] = WeakKeyDictionary()
_acting: list[Optimizer] = []
_gates = set[Callable[..., Any]]()


def watch(optimizer: Optimizer, held: Held) -> None:
    """From now on nothing else may act on the parameters of this one, which a run has."""
    _register()
    _of_runs[optimizer] = ref(held)
    for name in ("step", "unscale_"):
        _gate(GradScaler, name, _may_scale)
    kinds: list[type] = [LRScheduler]
    for kind in kinds:  # a class has a step of its own, or its base's
        kinds += kind.__subclasses__()
        _gate(kind, "step", _may_schedule)


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(refuse)


def _gate(kind: type, name: str, may_act: Callable[..., bool]) -> None:
    call = vars(kind).get(name)
    if call is None or call in _gates:
        return

    @wraps(call)
    def gated(self: object, *args: Any, **kwargs: Any) -> Any:
        return call(self, *args, **kwargs) if may_act(self, *args, **kwargs) else None

    _gates.add(gated)
    setattr(kind, name, gated)


def _may_scale(scaler: GradScaler, optimizer: Any, *_: object, **__: object) -> bool:
    for its, held in _runs_of(optimizer) if scaler.is_enabled() else ():
        if not held.has(scaler):
            raise ZeroError(_SCALER.format(type(scaler).__name__, type(its).__name__))
    return True


def _may_schedule(scheduler: LRScheduler, *_: object, **__: object) -> bool:
    for its, held in _runs_of(scheduler.optimizer):
        if not held.has(scheduler) and not (is_over := held.is_over()):
            if is_over is None:
                return False
            raise ZeroError(_SCHEDULER.format(type(scheduler).__name__, type(its).__name__))
    return True


def _runs_of(optimizer: Any) -> list[tuple[Optimizer, Held]]:
    """The optimizers of runs that have parameters of this one, and what those runs hold."""
    if optimizer in _of_runs:
        found = [optimizer]
    else:
        own = _members(optimizer)
        found = [each for each in tuple(_of_runs) if own & _members(each)]
    pairs = ((each, _of_runs[each]()) for each in found)
    return [(each, held) for each, held in pairs if held is not None]


@contextmanager
def acts(optimizer: Optimizer) -> Iterator[None]:
    """Within it, the optimizer of a run steps: so may others inside of it, as a wrapper has one."""
    _acting.append(optimizer)
    try:
        yield
    finally:
        _acting.pop()


def refuse(optimizer: Optimizer, *_: object) -> None:
    """A hook of all steps.

    Raises:
        ZeroError: The optimizer is no run's, and steps parameters of one.
    """
    if optimizer in _of_runs or _acting or makes_state(optimizer):
        return
    for each, _held in _runs_of(optimizer):
        raise ZeroError(_OTHER.format(type(optimizer).__name__, type(each).__name__))


def _members(optimizer: Optimizer) -> set[int]:
    return {id(each) for group in optimizer.param_groups for each in group["params"]}


def makes_state(optimizer: Optimizer) -> bool:
    """Whether a step is torch's own: `get_state_dict` makes state by one, with gradients of 0."""
    # Only the call itself says so: a step of the script may have zeros and a learning rate of 0,
    # too. One with state needs none, which leaves out the look at the stack in nearly all steps.
    frame = None if optimizer.state else sys._getframe()
    while frame is not None:
        if frame.f_code is _init_optim_state.__code__:
            return True
        frame = frame.f_back
    return False
