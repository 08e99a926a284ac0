"""The Lion optimizer: signs of a momentum, one state per parameter.

Elementwise, so it works on shards as it does on whole parameters. Source: Chen et al., Symbolic
Discovery of Optimization Algorithms (arXiv 2302.06675), algorithm 2; defaults as in DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """EvoLved Sign Momentum."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"Lion: lr {lr} and weight_decay {weight_decay} must be at least 0, betas {betas} "
                "in [0, 1)"
            )
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step on every parameter that has a gradient."""
        loss = torch.enable_grad()(closure)() if closure is not None else None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state["exp_avg"] = torch.zeros_like(param)
                    momentum, (beta1, beta2) = state["exp_avg"], group["betas"]
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                    param.add_(
                        momentum.mul(beta1).add_(param.grad, alpha=1 - beta1).sign_(),
                        alpha=-group["lr"],
                    )
                    # After the step, which takes another mixture of what it was before.
                    momentum.mul_(beta2).add_(param.grad, alpha=1 - beta2)
        return loss
