"""The Muon optimizer: the orthogonal factor of the momentum for matrices, Adam for the rest.

Which parameters are matrices is said by an attribute `use_muon` of each, or by that key in a param
group; `mark` gives it to those of a model by DeepSpeed's rule. Must always hold: a group is all of
one kind, so that its parameters have the same state.

Source: K. Jordan, Muon (2024); names, defaults, the rule and the Adam for the rest as in DeepSpeed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero_engine.optim.newton_schulz import METHODS, orthogonalized
from zero_engine.optim.whole import Directed, LooksAtWhole

_FLAG = "use_muon"
_NOT_HIDDEN = ("embed", "lm_head")
"""In the names of matrices that are tables of vectors."""
_RATES = {True: 0.02, False: 3e-4}
"""Of matrices and of the rest, where none is given."""


def mark(model: nn.Module) -> None:
    """Set `use_muon` on parameters that have none: hidden matrices, not embeddings and heads."""
    for name, param in model.named_parameters():
        if not hasattr(param, _FLAG):
            hidden = not any(part in name.lower() for part in _NOT_HIDDEN)
            setattr(param, _FLAG, param.dim() >= 2 and hidden)


class Muon(LooksAtWhole):
    """Momentum, orthogonalized, for matrices; Adam with decoupled decay for all others."""

    def __init__(  # noqa: PLR0913, PLR0917 - the keys of DeepSpeed, and what torch's has
        self,
        params: Iterable[Any],
        lr: float | None = None,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_method: str = "gram",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        weight_decay: float = 0.0,
    ) -> None:
        """Cut the param groups into matrices and others; a group's own options come first.

        Args:
            params: Parameters or param groups.
            lr: Where the next two are not given; None: 0.02 for matrices, 0.0003 for others.
            muon_lr: Of matrices.
            adam_lr: Of others.
            momentum: The part of the momentum that a step keeps.
            nesterov: The direction is what the next momentum will be, were the gradient the same.
            ns_steps: Of the Newton-Schulz iteration.
            ns_method: "gram" or "standard": two ways to compute the same.
            betas: Of Adam.
            eps: Of Adam.
            weight_decay: Of both, decoupled.

        Raises:
            ValueError: An option is out of its range, or it is not said what is a matrix.
        """
        matrices = {
            "lr": _first(muon_lr, lr, _RATES[True]),
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "ns_method": ns_method,
            "weight_decay": weight_decay,
        }
        others = {
            "lr": _first(adam_lr, lr, _RATES[False]),
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
        }
        groups = list(_groups(params, {True: matrices, False: others}))
        for group in groups:
            _check(group)
        super().__init__(groups, {})

    def direct(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """The momentum, or Adam's direction."""
        state = self.state[param]
        (direct_momentum if group[_FLAG] else _direct_adam)(param, gradient, state, group)

    def look(self, directions: Sequence[Directed]) -> None:
        """Orthogonalize the directions of matrices."""
        changes = [
            partial(_orthogonal, steps=group["ns_steps"], method=group["ns_method"])
            if group[_FLAG]
            else None
            for _, _, group in directions
        ]
        self.whole.change([direction for _, direction, _ in directions], changes)

    def apply(self, param: Tensor, direction: Tensor, group: dict[str, Any]) -> None:
        """Decay, then move."""
        decay_and_move(param, direction, group)


def direct_momentum(
    param: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
) -> None:
    """Take a gradient into the momentum and put the direction in its place."""
    if not state:
        state["momentum_buffer"] = torch.zeros_like(param)
    momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
    if group["nesterov"]:
        gradient.lerp_(momentum, group["momentum"])
    else:
        gradient.copy_(momentum)


def decay_and_move(param: Tensor, direction: Tensor, group: dict[str, Any]) -> None:
    """Decay weights, independent of their direction, and move them along it."""
    rate = float(group["lr"])
    param.mul_(1 - rate * group["weight_decay"]).add_(direction, alpha=-rate)


def _direct_adam(
    param: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
) -> None:
    if not state:
        state.update(step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
    state["step"] += 1
    beta1, beta2 = group["betas"]
    first = state["exp_avg"].lerp_(gradient, 1 - beta1)
    second = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    length = second.div(1 - beta2 ** state["step"]).sqrt_().add_(group["eps"])
    torch.div(first, length, out=gradient).div_(1 - beta1 ** state["step"])


def _orthogonal(direction: Tensor, *, steps: int, method: str) -> Tensor:
    """The step of a whole parameter: a matrix, a stack of matrices, or filters of a convolution."""
    rows, columns = direction.shape[-2:]
    matrix = direction.flatten(1) if direction.dim() == 4 else direction
    return (
        orthogonalized(matrix, steps, method)
        .mul_(math.sqrt(max(1, rows / columns)))
        .view_as(direction)
    )


# ---- param groups ----


def _groups(params: Iterable[Any], options: dict[bool, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Param groups of one kind each, with all of their options."""
    given = list(params)
    plain = bool(given) and not isinstance(given[0], dict)
    for index, group in enumerate([{"params": given}] if plain else given):
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        kinds = [group.get(_FLAG, getattr(param, _FLAG, None)) for param in members]
        if None in kinds:
            raise ValueError(
                f"Muon: parameter {kinds.index(None)} of param group {index} is not said to be a "
                f"matrix or not; set its attribute {_FLAG}, or that key in the group"
            )
        for kind, own in options.items():
            chosen = [p for p, flag in zip(members, kinds, strict=True) if bool(flag) is kind]
            if chosen:
                yield own | group | {"params": chosen, _FLAG: kind}


def _check(group: dict[str, Any]) -> None:
    bounds = {"lr": math.inf, "weight_decay": math.inf, "eps": math.inf, "momentum": 1}
    values = {name: group[name] for name in bounds if name in group}
    betas = dict(zip(("beta1", "beta2"), group.get("betas", ()), strict=False))
    for name, value in (values | betas).items():
        if not 0 <= value < bounds.get(name, 1):
            raise ValueError(f"Muon: {name} {value} is not in [0, {bounds.get(name, 1)})")
    if not group[_FLAG]:
        return
    if group["ns_method"] not in METHODS or group["ns_steps"] < 1:
        raise ValueError(
            f"Muon: ns_method {group['ns_method']!r} must be one of {', '.join(METHODS)}, ns_steps "
            f"{group['ns_steps']} at least 1"
        )
    if vectors := [tuple(param.shape) for param in group["params"] if param.dim() < 2]:
        raise ValueError(f"Muon: a parameter of shape {vectors[0]} is no matrix; unset {_FLAG}")


def _first(*rates: float | None) -> float:
    return next(rate for rate in rates if rate is not None)
