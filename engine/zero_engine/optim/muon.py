"""The Muon optimizer: the orthogonal factor of the momentum for matrices, Adam for the rest.

Owns both kinds of it, that of the config and `torch.optim.Muon` of a script, and the Newton-Schulz
iteration that finds the orthogonal factor roughly: all singular values are brought near to 1. A
parameter is a matrix if its attribute `use_muon`, or that key of its param group, is True.

Source: K. Jordan, Muon (2024), also for the quintic and its coefficients, which leave singular
values between 0.7 and 1.2; T. Dao et al., Gram Newton-Schulz (2026), for the second way to compute
the same. Names, defaults, the rule and the Adam for the rest are DeepSpeed's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero_engine.optim.steps import only
from zero_engine.optim.whole import Directed, LooksAtWhole

TORCH_MUON: type[torch.optim.Optimizer] | None = getattr(torch.optim, "Muon", None)
"""None before torch 2.9."""
_OF_A_MATRIX = ("ns_coefficients", "ns_steps", "eps", "adjust_lr_fn")
"""The options of torch's Muon that say what is done with a whole matrix."""

_FLAG = "use_muon"
_NOT_HIDDEN = ("embed", "lm_head")
"""A matrix with one of these in its name is a table of vectors, and not hidden."""
_RATES = {True: 0.02, False: 3e-4}
"""The default learning rates of matrices and of the rest."""

QUINTIC = (3.4445, -4.7750, 2.0315)
_EPSILON = 1e-7
_RESTART = 3
"""Steps on one Gram matrix: with more of them its rounding errors would grow too large."""


def mark(model: nn.Module) -> None:
    """Set `use_muon` on parameters that have none: hidden matrices, not embeddings and heads."""
    for name, param in model.named_parameters():
        if not hasattr(param, _FLAG):
            hidden = not any(part in name.lower() for part in _NOT_HIDDEN)
            setattr(param, _FLAG, param.dim() >= 2 and hidden)


class _Decayed(LooksAtWhole):
    """An optimizer that decays weights independent of their direction."""

    def apply(self, param: Tensor, direction: Tensor, group: dict[str, Any]) -> None:
        """Decay weights, then move them along their direction."""
        rate = float(group["lr"])
        param.mul_(1 - rate * group["weight_decay"]).add_(direction, alpha=-rate)


class Muon(_Decayed):
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

        `lr` is the default of the rates of matrices, `muon_lr`, and of others, `adam_lr`; without
        it they are 0.02 and 0.0003. Momentum and ns_* (the Newton-Schulz iteration, "gram" or
        "standard": two ways to compute the same) are those of matrices, betas and eps of others.

        Raises:
            ValueError: An option is out of its range, or a parameter has no `use_muon`.
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
        groups = list(_groups_of_one_kind(params, {True: matrices, False: others}))
        for group in groups:
            _check(group)
        super().__init__(groups, {})

    def direct(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Put the momentum of a matrix, or Adam's direction of another, in the gradient's place."""
        state = self.state[param]
        if group[_FLAG]:
            direct_momentum(param, gradient, state, group)
            return
        if not state:
            state.update(
                step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param)
            )
        state["step"] += 1
        beta1, beta2 = group["betas"]
        first = state["exp_avg"].lerp_(gradient, 1 - beta1)
        second = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        length = second.div(1 - beta2 ** state["step"]).sqrt_().add_(group["eps"])
        torch.div(first, length, out=gradient).div_(1 - beta1 ** state["step"])

    def look(self, directions: Sequence[Directed]) -> None:
        """Orthogonalize the directions of matrices."""
        changes = [
            partial(_orthogonal, steps=group["ns_steps"], method=group["ns_method"])
            if group[_FLAG]
            else None
            for _, _, group in directions
        ]
        self.whole.change([direction for _, direction, _ in directions], changes)


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


def _orthogonal(direction: Tensor, *, steps: int, method: str) -> Tensor:
    """The step of a whole parameter: a matrix, a stack of matrices, or filters of a convolution."""
    # Of filters, too, the last two dimensions, as in Jordan's code and DeepSpeed's.
    rows, columns = direction.shape[-2:]
    matrix = direction.flatten(1) if direction.dim() == 4 else direction
    return (
        orthogonalized(matrix, steps, method)
        .mul_(math.sqrt(max(1, rows / columns)))
        .view_as(direction)
    )


# ---- param groups ----


def _groups_of_one_kind(
    params: Iterable[Any], options: dict[bool, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Param groups that are all matrices or all others, with all of their options."""
    given = list(params)
    plain = bool(given) and not isinstance(given[0], dict)
    for index, group in enumerate([{"params": given}] if plain else given):
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        kinds = [group.get(_FLAG, getattr(param, _FLAG, None)) for param in members]
        if None in kinds:
            raise ValueError(
                f"Muon: parameter {kinds.index(None)} of param group {index} has no {_FLAG}; set "
                f"its attribute {_FLAG}, or that key of the group, to True for a hidden matrix and "
                "to False for anything else"
            )
        # A group is all of one kind, so that its parameters have the same state.
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
        raise ValueError(f"Muon: a parameter of shape {vectors[0]} is not a matrix; unset {_FLAG}")


def _first(*rates: float | None) -> float:
    return next(rate for rate in rates if rate is not None)


# ---- torch's own Muon ----


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that steps the groups on shards: the given one, except for torch's Muon."""
    is_torchs = TORCH_MUON is not None and isinstance(optimizer, TORCH_MUON)
    return MuonOfTorch(optimizer) if is_torchs else optimizer


class MuonOfTorch(_Decayed):
    """`torch.optim.Muon` of a script, on shards: its groups and its state, in three passes."""

    def __init__(self, given: torch.optim.Optimizer) -> None:
        """Take over the groups of an optimizer, which keeps them."""
        # The same groups and state: the momentum stays under the key that torch has it under.
        super().__init__(given.param_groups, {})
        self.state = given.state
        self._given = given

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step all parameters, then the given optimizer without any."""
        # Its `load_state_dict` has put others in their places.
        self.param_groups, self.state = self._given.param_groups, self._given.state
        loss = super().step(closure)
        # So that its hooks and its schedulers see every step.
        with only(self, ()):
            self._given.step()
        return loss

    def direct(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Put the momentum in the gradient's place."""
        direct_momentum(param, gradient, self.state[param], group)

    def look(self, directions: Sequence[Directed]) -> None:
        """Let torch orthogonalize the directions."""
        changes = [
            partial(_orthogonal_by_torch, **{name: group[name] for name in _OF_A_MATRIX})
            for _, _, group in directions
        ]
        self.whole.change([direction for _, direction, _ in directions], changes)


def _orthogonal_by_torch(direction: Tensor, **options: Any) -> Tensor:
    """The step of torch's Muon for a matrix of zeros, at a rate of 1, without momentum."""
    assert TORCH_MUON is not None
    matrix = nn.Parameter(torch.zeros_like(direction))
    matrix.grad = direction
    plain: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
    TORCH_MUON([matrix], **plain, **options).step()
    return matrix.detach().neg_()


# ---- the Newton-Schulz iteration ----


def orthogonalized(matrix: Tensor, steps: int, method: str = "gram") -> Tensor:
    """The orthogonal factor of a matrix [..., rows, columns] in fp32, or of a stack, roughly."""
    iterate, on_gpu = METHODS[method]
    tall = matrix.size(-2) > matrix.size(-1)
    # The Gram matrix is made of rows: of the shorter side.
    wide = matrix.mT if tall else matrix
    # On a GPU in 16 bits, as is usual: the singular values miss 1 by more than the rounding.
    wide = wide.to(on_gpu if matrix.is_cuda else torch.float32)
    wide = wide / (wide.norm(dim=(-2, -1), keepdim=True) + _EPSILON)
    wide = iterate(wide, steps)
    return (wide.mT if tall else wide).to(matrix.dtype)


def _standard(wide: Tensor, steps: int) -> Tensor:
    a, b, c = QUINTIC
    for _ in range(steps):
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide


def _gram(wide: Tensor, steps: int) -> Tensor:
    # On the Gram matrix, whose side is the shorter one: the matrix itself is multiplied less.
    if wide.size(-2) == wide.size(-1):
        return _standard(wide, steps)
    a, b, c = QUINTIC
    for begin in range(0, steps, _RESTART):
        gram, product = wide @ wide.mT, None
        for _ in range(begin, min(begin + _RESTART, steps)):
            # A step multiplies the matrix with P = a + b G + c G G from the left, hence G with P
            # from both sides.
            factor = b * gram + c * gram @ gram
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
            gram = factor @ gram @ factor
            product = factor if product is None else factor @ product
        assert product is not None
        wide = product @ wide
    return wide


METHODS: dict[str, tuple[Callable[[Tensor, int], Tensor], torch.dtype]] = {
    # bf16 holds the products of the short way too coarsely; all of its values fit into fp16.
    "gram": (_gram, torch.float16),
    "standard": (_standard, torch.bfloat16),
}
"""Name in the config -> the iteration, and the dtype that it has on a GPU."""
