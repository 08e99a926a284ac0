"""DeepSpeed's `deepspeed.utils`: looking at and changing parameters, gradients, optimizer state.

They work at every stage, and for every param group. Every rank calls them, in the same order, for
the same parameters; the *local* ones use this rank's share of the flattened parameter.
`zero_engine.parameters.access` implements them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from zero_deepspeed.absent_names import raising_getattr
from zero_deepspeed.loaders import RepeatingLoader
from zero_deepspeed.utils.logging import log_dist, logger, set_log_level_from_string
from zero_engine.parameters.access import owned
from zero_engine.sharding.leaf_modules import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
)

__all__ = [
    "RepeatingLoader",
    "get_z3_leaf_modules",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_log_level_from_string",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]


def safe_get_full_fp32_param(param: nn.Parameter) -> Any:
    """The whole weights in the highest precision, a copy in the parameter's shape.

    None if the parameter is frozen, as in DeepSpeed; `GatheredParameters` shows its values.
    """
    return owned(param).weights() if param.requires_grad else None


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace the weights, for the next forward and the next step."""
    owned(param).set_weights(value)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The gradient summed over the global batch so far, without loss scale; None after a step."""
    return owned(param).gradient()


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace the gradient that the next step applies."""
    owned(param).set_gradient(value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace the gradients of several parameters by `update_func(gradient, parameter)`."""
    for param in param_list:
        gradient = owned(param).gradient() if param.requires_grad else None
        if gradient is not None:
            owned(param).set_gradient(update_func(gradient, param))


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Any:
    """A state, such as "exp_avg", in the parameter's shape; None before the first step."""
    return owned(param).state(optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace a state that has one value per element."""
    owned(param).set_state(optim_state_key, value)


def safe_get_local_fp32_param(param: nn.Parameter) -> Any:
    """This rank's share of the weights; None if they are frozen.

    On several nodes of several ranks, shares are not in the order of ranks (see docs/reduction.md):
    `safe_get_full_fp32_param` returns the whole parameter, in place of shares joined by a script.
    """
    return owned(param).weights_share() if param.requires_grad else None


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's share of the weights; every rank calls it."""
    owned(param).set_weights_share(value)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's share of the gradient; None after a step.

    Shares are in the order of `safe_get_local_fp32_param`; `safe_get_full_grad` returns the whole.
    """
    return owned(param).gradient_share()


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's share of the gradient."""
    owned(param).set_gradient_share(value)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Any:
    """This rank's share of a state; None before the first step.

    Shares are in the order of `safe_get_local_fp32_param`; `safe_get_full_optimizer_state` returns
    the whole state.
    """
    return owned(param).state_share(optim_state_key)


def safe_set_local_optimizer_state(
    param: nn.Parameter, value: Tensor, optim_state_key: str
) -> None:
    """Replace this rank's share of a state; every rank calls it."""
    owned(param).set_state_share(optim_state_key, value)


if not TYPE_CHECKING:  # for which every name would be there
    __getattr__ = raising_getattr(__name__)
