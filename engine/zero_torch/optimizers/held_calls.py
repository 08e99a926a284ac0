"""The calls of a script that do nothing until the last micro-batch of a step.

Owns what a loss scaler has of a step. Must always hold: whoever calls them, the script, `run.step`
or a library, optimizer, scheduler, scaler and averages of the weights act once in a step, in its
last micro-step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.optim.swa_utils import AveragedModel

from zero_contract.errors import ConfigError, ZeroError
from zero_torch.optimizers.local_step import local_tensors
from zero_torch.optimizers.others import acts, makes_state, watch
from zero_torch.optimizers.supported import NO_CLOSURE, takes_no_metric

HELD = (
    "give a scheduler to zero_torch.protect(scheduler=...), which holds it until the last micro-"
    "batch of a step, and change options where run.step() has returned True"
)
_EPOCH = (
    "{}.step() got an argument, as an epoch and a part of it by the number of a batch: a step has "
    "more batches of a rank where there are fewer ranks; call step() without one, and give the "
    "scheduler its lengths in steps of the run"
)
_TAKEN = "the {} is that of another run of this process: {}"
_REMEDIES = {
    "model": "a run keeps its hooks; give protect a model of its own (of one in "
    "DistributedDataParallel: wrap its .module anew) and a new optimizer, or load the checkpoint "
    "of the other run in a new process",
    "optimizer": "make another one from the parameters of this run's model",
    "scheduler": "make another one from the optimizer of this run",
    "scaler": "give each run a torch.amp.GradScaler of its own",
}
_taken: WeakValueDictionary[int, object] = WeakValueDictionary()
"""What runs have, by `id`."""


def check_not_taken(**given: object) -> None:
    """Check that no other run has the model, optimizer, scheduler or scaler of one.

    Raises:
        ConfigError: One has; names it.
    """
    for what, each in given.items():
        if id(each) in _taken:
            raise ConfigError(_TAKEN.format(what, _REMEDIES[what]))


def take(*given: object) -> None:
    """See `check_not_taken`."""
    _taken.update({id(each): each for each in given if each is not None})


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The steps of a run, as far as these calls ask for them."""

    is_over: Callable[[], bool | None]
    """Whether what follows a step of the optimizer may act; None: nothing has an effect."""
    ends_now: Callable[[], bool]
    """Whether a call belongs to the last micro-step of its step."""
    may_act: Callable[[], bool]
    """Whether the optimizer may act, which it does once; then its gradients are final."""
    has_acted: Callable[[], bool]
    """Whether it has acted in this micro-step."""
    count: Callable[[bool], None]
    """Called when it has acted, with whether it has skipped the step."""


class HeldCalls:
    """The calls of one optimizer, scheduler and scaler, and of averages among further objects.

    Attributes:
        unscaled: Whether the gradients of this step are unscaled.
        steps_scheduler: Whether there is a scheduler whose `step` needs nothing of the script.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        scaler: torch.amp.GradScaler | None,
        others: Iterable[object] = (),
    ) -> None:
        self.unscaled = False
        self.steps_scheduler = scheduler is not None and takes_no_metric(scheduler)
        self._steps: Steps | None = None
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._scaler = scaler
        self._averages = [each for each in others if isinstance(each, AveragedModel)]

    def hold(self, steps: Steps) -> None:
        """Hold the calls from now on; or, if they are held already, for another run."""
        before, self._steps = self._steps, steps
        if before is not None:
            return
        take(self._optimizer, self._scheduler, self._scaler)
        watch(self._optimizer, self)
        replace(self._optimizer, "step", self._step)
        if self._scheduler is not None:
            derive(self._scheduler, "step", self._schedule)
        for average in self._averages:
            derive(average, "update_parameters", self._if_over)
        if self._scaler is not None:
            self._update_scaler = self._scaler.update  # before it is held: `drop` calls it
            replace(self._scaler, "unscale_", self._unscale)
            replace(self._scaler, "step", self._scaler_step)
            replace(self._scaler, "update", self._if_over)

    def drop(self) -> None:
        """Drop what the scaler has of a step."""
        # A GradScaler has no call for it: `update` forgets the step, and its change is taken back.
        if self.unscaled and self._scaler is not None:
            state, self.unscaled = self._scaler.state_dict(), False
            self._update_scaler()
            self._scaler.load_state_dict(state)

    def has(self, other: object) -> bool:
        """See `others.Held`."""
        return other in (self._scaler, self._scheduler)

    def is_over(self) -> bool | None:
        """See `others.Held`."""
        return self._run.is_over()

    @property
    def _run(self) -> Steps:
        assert self._steps is not None  # else no call is held
        return self._steps

    def _if_over(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs) if self.is_over() else None

    def _schedule(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.steps_scheduler and any(each is not None for each in (*args, *kwargs.values())):
            raise ZeroError(_EPOCH.format(type(self._scheduler).__name__))
        return self._if_over(call, *args, **kwargs)

    def _unscale(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._run.ends_now():
            self.unscaled = True
            call(*args, **kwargs)

    def _step(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # torch's get_state_dict steps once, to make state: that is no step of the run.
        if makes_state(self._optimizer):
            return call(*args, **kwargs)
        if any(each is not None for each in (*args, *kwargs.values())):
            raise ZeroError(NO_CLOSURE)
        if not self._run.may_act():
            return None
        with acts(self._optimizer), local_tensors(self._optimizer):
            result = call()
        self._run.count(False)
        return result

    def _scaler_step(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._run.may_act():
            return None
        result = call(*args, **kwargs)
        if not self._run.has_acted():  # the gradients were not finite
            self._run.count(True)
        return result


def replace(owner: Any, name: str, held: Callable[..., Any]) -> None:
    """Replace a method of one object; torch's schedulers need it to be a bound method."""
    setattr(owner, name, MethodType(_method(owner, name, held), owner))


def derive(owner: Any, name: str, held: Callable[..., Any]) -> None:
    """Replace one through a derived class: the state_dict of a scheduler has all its attributes."""
    base: Any = type(owner)

    def as_it_was(self: Any, _protocol: Any) -> Any:
        """Of a copy, or in a file: the class without this, whose calls are its own."""
        make, (_, *given), *rest = base.__reduce_ex__(self, 1)  # later ones allow no other class
        return make, (base, *given), *rest

    own = {name: _method(owner, name, held), "__reduce_ex__": as_it_was}
    owner.__class__ = type(base.__name__, (base,), own)


def _method(owner: Any, name: str, held: Callable[..., Any]) -> Callable[..., Any]:
    call = getattr(owner, name)

    @wraps(call)
    def method(_: Any, *args: Any, **kwargs: Any) -> Any:
        return held(call, *args, **kwargs)

    return method
