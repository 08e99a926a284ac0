"""What DeepSpeed's optimizers show, as attributes of the one that an engine steps."""

from __future__ import annotations

import weakref

import torch

from zero_deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from zero_engine.optim.zero_optimizer import ZeroOptimizer


class LossScaler:
    """`optimizer.loss_scaler`: the loss scale and its rules, to be read."""

    scale_factor = 2.0

    def __init__(self, zero: ZeroOptimizer) -> None:
        # A script that keeps the optimizer must not keep gradients.
        self._zero = weakref.proxy(zero)
        rules = zero.scaling
        self.dynamic = self.dynamic_loss_scale = rules.dynamic
        self.scale_window = rules.window
        self.min_scale = self.min_loss_scale = rules.minimum
        self.delayed_shift = rules.hysteresis
        self.consecutive_hysteresis = rules.consecutive_hysteresis

    @property
    def cur_scale(self) -> float:
        """The loss scale."""
        return float(self._zero.scale_state.scale)

    loss_scale = cur_scale

    @property
    def cur_hysteresis(self) -> int:
        """Overflows until it falls."""
        return int(self._zero.scale_state.hysteresis)

    @property
    def cur_iter(self) -> int:
        """Steps, skipped ones included."""
        return int(self._zero.scale_state.step)

    @property
    def last_overflow_iter(self) -> int:
        """The step of the last overflow; -1 before the first."""
        return int(self._zero.scale_state.last_overflow)


def show(optimizer: torch.optim.Optimizer, zero: ZeroOptimizer, stage: int) -> None:
    """Set the attributes."""
    scaler = LossScaler(zero)
    vars(optimizer).update(
        loss_scaler=scaler,
        loss_scale_config=scaler,
        dynamic_loss_scale=scaler.dynamic,
        optimizer=weakref.proxy(optimizer),  # the one inside of DeepSpeed's
    )
    if stage == 3:
        vars(optimizer)["parameter_offload"] = DeepSpeedZeRoOffload()
