"""How much memory a rank needs for the state of training, before anything is allocated.

Owns the arithmetic, which follows `flat_unit`, `zero_optimizer` and `grad_reducer` line by line;
tests hold it against what an engine really allocates. Left out: activations, and the buffers in
flight, which are at most four times the largest unit (two being gathered, two being reduced).

Called by `python -m zero_engine.config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zero_engine.config.schema import Config, OptimizerConfig
from zero_engine.stages import STAGES

_FP32_BYTES = 4
_COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

_STATES: dict[str, int] = {
    "adadelta": 2,
    "adagrad": 1,
    "adam": 2,
    "adamax": 2,
    "adamw": 2,
    "asgd": 1,
    "lamb": 2,
    "lion": 1,
    "nadam": 2,
    "radam": 2,
    "rmsprop": 1,
    "rprop": 2,
    "sgd": 0,
}
"""Optimizer -> fp32 values that it keeps per parameter."""

_OPTIONAL_STATES = {"amsgrad": 1, "centered": 1, "momentum": 1}
"""Option -> the further values that it takes when it is on."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes on one rank."""

    weights: int
    """What forward and backward read."""
    master: int
    """fp32 weights beside those."""
    moments: int
    gradients: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.master + self.moments + self.gradients


def estimate(parameters: int, *, stage: int, compute: str, states: int, world: int) -> Estimate:
    """The state of training `parameters` parameters.

    Args:
        parameters: Trained parameters of the whole model.
        stage: ZeRO stage.
        compute: "fp32", "bf16" or "fp16".
        states: fp32 values that the optimizer keeps per parameter.
        world: Ranks.

    Source of the formulas: ZeRO (arXiv 1910.02054), section 3, with fp32 gradient sums.
    """
    policy, size = STAGES[stage], _COMPUTE_BYTES[compute]
    shard = -(-parameters // world)
    stepped = shard if policy.shards_optimizer else parameters
    has_own_master = compute != "fp32" or policy.shards_parameters
    sums = _FP32_BYTES * (shard + (0 if policy.shards_optimizer else parameters))
    unreduced = 0 if policy.shards_gradients else size * parameters
    return Estimate(
        weights=0 if policy.shards_parameters else size * parameters,
        master=_FP32_BYTES * stepped if has_own_master else 0,
        moments=_FP32_BYTES * states * stepped,
        gradients=sums + unreduced,
    )


def optimizer_states(optimizer: OptimizerConfig | None) -> int | None:
    """fp32 values per parameter; None if the optimizer is not in the config or not known."""
    if optimizer is None:
        return None
    states = _STATES.get(optimizer.type.lower())
    params: Mapping[str, Any] = optimizer.params
    return (
        None
        if states is None
        else states
        + sum(
            extra
            for option, extra in _OPTIONAL_STATES.items()
            if params.get(option) not in (None, "auto", 0, False)
        )
    )


def estimate_for(config: Config, parameters: int, world: int) -> Estimate:
    """The estimate for a config; an unknown optimizer counts as Adam."""
    states = optimizer_states(config.optimizer)
    return estimate(
        parameters,
        stage=config.zero_optimization.stage,
        compute=config.compute,
        states=2 if states is None else states,
        world=world,
    )
