"""The LAMB optimizer: Adam's direction, its length taken from each whole parameter's norm.

Not elementwise: a shard needs the norms of the parameters that it holds pieces of. Must always
hold: the optimizer asks `whole` for them and for nothing else; in a script of its own the
tensors are whole parameters, on shards `zero_optimizer` puts `parameter_norms` in that place.

Source: You et al. (arXiv 1904.00962); the trust ratio, its bounds and the bias correction, which
enters the rate and not the ratio, as in DeepSpeed's FusedLamb.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Norms = list[tuple[slice, float]]
"""The pieces of one tensor, and the norm of the whole parameter that each is a part of."""


class Whole(Protocol):
    """Who knows the parameters that the optimizer's tensors are pieces of."""

    def norms(self, tensors: Sequence[Tensor]) -> list[Norms]:
        """For each tensor, shaped as the optimizer's parameter in the same place, its pieces."""


class Itself:
    """Every tensor is a whole parameter."""

    def norms(self, tensors: Sequence[Tensor]) -> list[Norms]:
        """One piece each."""
        return [[(slice(None), float(torch.linalg.vector_norm(each)))] for each in tensors]


class Lamb(torch.optim.Optimizer):
    """Layerwise adaptive moments."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"Lamb: lr {lr}, eps {eps} and weight_decay {weight_decay} must be at least 0, "
                f"betas {betas} in [0, 1)"
            )
        if not 0 < min_coeff <= max_coeff:
            raise ValueError(
                f"Lamb: min_coeff {min_coeff} and max_coeff {max_coeff}: 0 < min <= max"
            )
        options = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, options)
        self.whole: Whole = Itself()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step on every parameter that has a gradient."""
        loss = torch.enable_grad()(closure)() if closure is not None else None
        pairs = list(self._with_gradients())
        params = [param for param, _ in pairs]
        updates = [self._direction(param, group) for param, group in pairs]
        weights, lengths = self.whole.norms(params), self.whole.norms(updates)
        for (param, group), update, weight, length in zip(
            pairs, updates, weights, lengths, strict=True
        ):
            rate = _rate(group, self.state[param]["step"])
            for (piece, weight_norm), (_, length_norm) in zip(weight, length, strict=True):
                ratio = _trust(weight_norm, length_norm, group)
                param[piece].add_(update[piece], alpha=-rate * ratio)
        return loss

    def _with_gradients(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        for group in self.param_groups:
            yield from ((param, group) for param in group["params"] if param.grad is not None)

    def _direction(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        """Take the gradient into the moments; Adam's direction, without bias correction."""
        state = self.state[param]
        if not state:
            state.update(
                step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param)
            )
        state["step"] += 1
        assert param.grad is not None
        beta1, beta2 = group["betas"]
        first = state["exp_avg"].mul_(beta1).add_(param.grad, alpha=1 - beta1)
        second = state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
        return (first / second.sqrt().add_(group["eps"])).add_(param, alpha=group["weight_decay"])


def _rate(group: dict[str, Any], step: int) -> float:
    if not group["bias_correction"]:
        return float(group["lr"])
    beta1, beta2 = group["betas"]
    return float(group["lr"] * math.sqrt(1 - beta2**step) / (1 - beta1**step))


def _trust(weight: float, length: float, group: dict[str, Any]) -> float:
    """The ratio of the norms within its bounds; 1 where one of them is 0."""
    if weight == 0 or length == 0:
        return 1.0
    return float(min(max(weight / length, group["min_coeff"]), group["max_coeff"]))
