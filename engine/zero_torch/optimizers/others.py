"""Optimizers of a script that are no run's, and step parameters of one.

Nothing would fail: each rank would step in each micro-batch, on what torch has in `.grad` there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from weakref import WeakSet

from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zero_contract.errors import ZeroError

_OTHER = (
    "this {} steps parameters that the {} of a run has: its step does not wait for the last micro-"
    "batch, so each rank would train on its own gradients, and no checkpoint has its state. Give "
    "all parameters to the optimizer of zero_torch.protect(), in param groups; to go on with "
    "another one, begin a new run with the weights of this one"
)
_of_runs: WeakSet[Optimizer] = WeakSet()
_acting: list[Optimizer] = []


def watch(optimizer: Optimizer) -> None:
    """From now on no other optimizer may step the parameters of this one, which a run has."""
    _of_runs.add(optimizer)
    _register()


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(refuse)


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
    own = _members(optimizer)
    for each in tuple(_of_runs):
        if own & _members(each):
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
