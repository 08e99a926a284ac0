"""The LAMB optimizer: Adam's direction, its length taken from each whole parameter's norm.

Source: You et al. (arXiv 1904.00962). The trust ratio, its bounds and the bias correction, which
enters the learning rate and not the ratio, are those of DeepSpeed's FusedLamb.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_engine.optim.whole import Directed, LooksAtWhole, chunk_norms


class Lamb(LooksAtWhole):
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
        self._measured: defaultdict[Tensor, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        """Chunk norms of weights and directions, part by part, from `direct` to `look`."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy; between steps no norms are kept."""
        super().__setstate__(state)
        self._measured = defaultdict(list)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step on every parameter that has a gradient."""
        self._measured.clear()  # of a step that has failed half way
        return super().step(closure)

    def direct(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Put Adam's direction, without bias correction, in the gradient's place."""
        state = self.state[param]
        if not state:
            state.update(
                step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param)
            )
        state["step"] += 1
        beta1, beta2 = group["betas"]
        first = state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        second = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        length = second.sqrt().add_(group["eps"])
        if not group["eps"]:  # 0/0 where there was no gradient yet, as in a unit's padding
            length.masked_fill_(length == 0, 1)
        torch.div(first, length, out=gradient)
        gradient.add_(param, alpha=group["weight_decay"])
        # Here, since the weights may be away in `look`.
        self._measured[param].append((chunk_norms(param), chunk_norms(gradient)))

    def look(self, directions: Sequence[Directed]) -> None:
        """Multiply each direction with its trust ratio: the bounded ratio of norms; 1 at a zero."""
        measured = [self._measured.pop(param) for param, _, _ in directions]
        weights = self.whole.norms([torch.cat([w for w, _ in parts]) for parts in measured])
        lengths = self.whole.norms([torch.cat([d for _, d in parts]) for parts in measured])
        for (_, direction, group), weight, length in zip(directions, weights, lengths, strict=True):
            for (piece, weight_norm), (_, length_norm) in zip(weight, length, strict=True):
                trust = 1.0
                if weight_norm != 0 and length_norm != 0:
                    ratio = weight_norm / length_norm
                    trust = float(min(max(ratio, group["min_coeff"]), group["max_coeff"]))
                direction[piece].mul_(trust)

    def apply(self, param: Tensor, direction: Tensor, group: dict[str, Any]) -> None:
        """Move weights at the group's rate, corrected for the bias of young moments."""
        rate, step = float(group["lr"]), self.state[param]["step"]
        if group["bias_correction"]:
            beta1, beta2 = group["betas"]
            rate = float(group["lr"] * math.sqrt(1 - beta2**step) / (1 - beta1**step))
        param.add_(direction, alpha=-rate)
