"""A step of an optimizer on the elements that this rank has, without the dispatch of DTensor.

DTensor finds out for each operation on each tensor how the result lies; in the first step that
takes longer than all the rest of a resume. Where each element is stepped by itself, the operations
on local tensors are the same.

Must always hold: outside of `local_tensors` the optimizer has the parameters and the state that
torch would have given it, whatever happens inside.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as base

from zero_torch.optimizers.others import refuse
from zero_torch.optimizers.supported import is_elementwise
from zero_torch.wrapped import like, local


@contextmanager
def local_tensors(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within it, an optimizer has local tensors in the place of DTensors, if the bits are equal."""
    if not steps_by_element(optimizer):
        yield
        return
    state, groups = optimizer.state, optimizer.param_groups
    whole = [group["params"] for group in groups]
    with torch.no_grad():  # then `to_local` is a view
        locals_ = {p: local(p) for parameters in whole for p in parameters}
        before = {p: {k: local(v) for k, v in state[p].items()} for p in locals_ if p in state}
        for parameter, mine in locals_.items():
            if mine is not parameter:
                mine.grad = local(parameter.grad)
    of_local = {locals_[p]: dict(values) for p, values in before.items()}
    try:
        # As torch's own, which makes state for a parameter that has none.
        optimizer.state = ours = defaultdict(dict, of_local)
        for group, parameters in zip(groups, whole, strict=True):
            group["params"] = [locals_[p] for p in parameters]
        yield
    finally:
        optimizer.state = state
        for group, parameters in zip(groups, whole, strict=True):
            group["params"] = parameters
        for parameter, mine in locals_.items():
            if mine is not parameter:
                mine.grad = None
            if mine in ours:
                _take_back(parameter, state[parameter], before.get(parameter, {}), ours[mine])


def _take_back(
    parameter: Tensor, state: dict[str, Any], before: dict[str, Any], after: dict[str, Any]
) -> None:
    """Put into the state of a parameter what the optimizer has made anew."""
    with torch.no_grad():
        for key, value in after.items():
            if before.get(key) is not value:
                number = not isinstance(value, Tensor) or not value.dim()
                state[key] = value if number else like(parameter, value)


def steps_by_element(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has DTensors, each element is stepped by itself, and nobody looks on."""
    every = (p for group in optimizer.param_groups for p in group["params"])
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        [each for each in base._global_optimizer_pre_hooks.values() if each is not refuse],
        base._global_optimizer_post_hooks,
    )
    of_dtensors = any(isinstance(each, DTensor) for each in every)
    return of_dtensors and is_elementwise(optimizer) and not any(hooks)
