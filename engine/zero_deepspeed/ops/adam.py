"""DeepSpeed's `deepspeed.ops.adam`: torch's fused AdamW, under two names.

The device of the step follows from the place of the shards, so both are the same optimizer, and the
checkpoint of one can be resumed with the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zero_contract.errors import ConfigError
from zero_deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from zero_engine.config import Config
from zero_engine.config.schema import NONE

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


class FusedAdam(torch.optim.Adam):
    """AdamW, or with `adam_w_mode=False` Adam, whose decay is a part of the gradient."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        """Make it; `set_grad_none` has no effect: gradients are always freed.

        Raises:
            ConfigError: `bias_correction` is False, which torch's Adam does not support.
        """
        del set_grad_none
        if not bias_correction:
            raise ConfigError("bias_correction=False: Adam is always corrected here; leave it out")
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            fused=True,
            decoupled_weight_decay=adam_w_mode,
        )

    @property
    def adam_w_mode(self) -> bool:
        """Whether the decay is no part of the gradient."""
        return bool(self.defaults["decoupled_weight_decay"])

    @property
    def recorded_as(self) -> str:
        """The name in checkpoints: torch's."""
        return "AdamW" if self.adam_w_mode else "Adam"


class DeepSpeedCPUAdam(FusedAdam):
    """`FusedAdam` with DeepSpeed's order of arguments for the CPU's Adam."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        """Make it. Raises ConfigError if `bias_correction` or `fp32_optimizer_states` is False."""
        if not fp32_optimizer_states:
            raise ConfigError("fp32_optimizer_states=False: moments are fp32 here; leave it out")
        super().__init__(
            model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad
        )


_NAMES = {
    torch.optim.AdamW: (FusedAdam, DeepSpeedCPUAdam),
    torch.optim.Adam: (FusedAdam, DeepSpeedCPUAdam),
    torch.optim.Adagrad: (torch.optim.Adagrad, DeepSpeedCPUAdagrad),
}
"""Class that the engine makes from a config -> DeepSpeed's, on the device and offloaded."""


def name_as_deepspeed(optimizer: torch.optim.Optimizer, config: Config) -> None:
    """Give an optimizer of the config the class that DeepSpeed would make: scripts ask for it."""
    made = config.optimizer
    if made is None or made.type.lower().startswith("mu"):  # those of muP are torch's there, too
        return
    if type(optimizer) in _NAMES and not made.params.get("torch_adam"):
        offloaded = config.zero_optimization.offload_optimizer.device != NONE
        optimizer.__class__ = _NAMES[type(optimizer)][offloaded]
        optimizer._patch_step_function()  # torch calls a script's hooks in the step of one class
