"""What DeepSpeed's engine tells about itself: counters, sizes, rates.

Must always hold: nothing here changes anything but the rates; a number is that of the whole run,
never of this rank. A base of `engine.Engine`, which sets the attributes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from zero_engine.config import Config
from zero_engine.core.micro_steps import MicroSteps
from zero_engine.optim.zero_optimizer import StepOutcome
from zero_engine.parts import Core, Run


class Epochs:
    """DeepSpeed's timer of throughput, which scripts tell of their epochs."""

    def update_epoch_count(self) -> None:
        """Nothing to do: an epoch's end is no end of a step, which is what is timed."""


class Accessors:
    """The part of an engine that only answers."""

    tput_timer = Epochs()

    optimizer: torch.optim.Optimizer | None
    world_size: int
    _config: Config
    _core: Core
    _run: Run
    _micro_steps: MicroSteps
    _last: StepOutcome | None

    def empty_partition_cache(self) -> None:
        """Nothing to do: parameters are released after every use. For scripts that call it."""

    # ---- where the run is ----

    @property
    def global_steps(self) -> int:
        """Optimizer steps since the run began, skipped ones included."""
        return self._run.cursor.step

    @property
    def micro_steps(self) -> int:
        """Micro-steps that this process has run."""
        return self._micro_steps.ended

    @property
    def global_samples(self) -> int:
        """Samples consumed by those steps."""
        return self._run.cursor.samples

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because the gradient norm was not finite."""
        return self._run.cursor.skipped

    @property
    def dp_world_size(self) -> int:
        """The ranks that share the batch: all of them."""
        return self.world_size

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-step under way is the last of its step."""
        return self._micro_steps.at_boundary

    def managed_gradient_accumulation(self) -> bool:
        """Whether the global batch decides where a step ends; otherwise `step()` ends one."""
        return self._config.managed_gradient_accumulation

    def was_step_applied(self) -> bool:
        """Whether the last micro-step changed the weights: not one that only accumulates."""
        return self._micro_steps.applied

    def get_global_grad_norm(self) -> float | None:
        """The gradient norm of the last step before clipping; None before the first step."""
        return self._last.norm if self._last is not None else None

    # ---- the batch ----

    def train_batch_size(self) -> int:
        """Samples per full step; the same at every world size."""
        return self._run.batch.samples

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per leaf."""
        return self._run.batch.micro_batch

    def gradient_accumulation_steps(self) -> int:
        """Micro-steps of a full step at this world size."""
        return -(-self._run.batch.leaves // self.world_size)

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples per step, samples per leaf, micro-steps."""
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    # ---- the optimizer ----
    # With `step()`, its first three make the engine one: Lightning's Fabric steps what has them.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's."""
        return self._need_optimizer("param_groups").param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The optimizer's."""
        return self._need_optimizer("defaults").defaults

    @property
    def state(self) -> Mapping[Any, Any]:
        """The optimizer's: that of shards."""
        return self._need_optimizer("state").state

    def _need_optimizer(self, name: str) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise AttributeError(f"engine.{name}: there is no optimizer")
        return self.optimizer

    def get_lr(self) -> list[float]:
        """The learning rate of each param group; NaN where the optimizer finds its own."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        rates = (group.get("lr") for group in groups)
        return [math.nan if rate is None else float(rate) for rate in rates]

    def set_lr(self, lr: float) -> None:
        """Give every param group this learning rate; a schedule changes it with its next step."""
        for group in self.optimizer.param_groups if self.optimizer is not None else []:
            group["lr"] = lr

    def get_mom(self) -> list[object]:
        """The momentum, or the betas, of each param group."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [group.get("betas", group.get("momentum")) for group in groups]

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied with before backward; 1 outside fp16 training."""
        return self._core.zero.scale if self._core.zero is not None else 1.0

    # ---- the config ----

    def zero_optimization_stage(self) -> int:
        """0, 1, 2 or 3."""
        return self._core.stage.number

    def zero_optimization(self) -> bool:
        """Whether anything is divided among the ranks."""
        return self._core.stage.shards_optimizer

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are divided: stages 2 and 3."""
        return self._core.stage.shards_gradients

    def zero_optimization_partition_weights(self) -> bool:
        """Whether weights are divided: stage 3."""
        return self._core.stage.shards_parameters

    def fp16_enabled(self) -> bool:
        """Whether the model computes in float16."""
        return self._config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether the model computes in bfloat16."""
        return self._config.bf16.enabled

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows the overflows."""
        return self._config.fp16.enabled and not self._config.fp16.loss_scale

    def gradient_clipping(self) -> float:
        """The largest global gradient norm; 0 is no limit."""
        return self._config.gradient_clipping

    def wall_clock_breakdown(self) -> bool:
        """Whether the parts of a step are timed."""
        return self._config.wall_clock_breakdown

    def optimizer_name(self) -> str | None:
        """The optimizer's name in the config, if it is there."""
        return self._config.optimizer.type.lower() if self._config.optimizer else None

    def scheduler_name(self) -> str | None:
        """The schedule's name in the config, if it is there."""
        return self._config.scheduler.type if self._config.scheduler else None

    def steps_per_print(self) -> int | None:
        """How often a step is logged; None for never."""
        return self._config.steps_per_print
