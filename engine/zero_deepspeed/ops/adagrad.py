"""DeepSpeed's `deepspeed.ops.adagrad`: torch's fused Adagrad."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad, with DeepSpeed's arguments."""

    recorded_as = "Adagrad"
    """The name in checkpoints: torch's."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        """Make it; `amsgrad` and `fp32_optimizer_states` change nothing, as in DeepSpeed."""
        del amsgrad, fp32_optimizer_states
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
