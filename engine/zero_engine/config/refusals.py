"""Combinations of keys that no run can have, as a table: each has a name, and says what to set.

What is wrong with one key by itself is said where the key is; `layout` adds what depends on more
than the config.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zero_comm.sums.plan import Where
from zero_contract.errors import ConfigError
from zero_engine.config.schema import NONE
from zero_engine.stages import STAGES
from zero_step.gradients.accumulation import BY_BACKEND, SHARDED

if TYPE_CHECKING:
    from zero_engine.config.schema import Config


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a run cannot be as its config says."""

    name: str
    text: str


def refusals(config: Config) -> Iterator[Refusal]:
    """The refusals of a config, in the order of the table."""
    rows = [*_stages(config), *_reduction(config), *_precision(config)]
    return (Refusal(name, text) for name, holds, text in rows if holds)


def check(config: Config) -> None:
    """Raise the first of a config as a ConfigError."""
    for each in refusals(config):
        raise ConfigError(each.text)


_Row = tuple[str, bool, str]
"""The name of a refusal, whether it holds, and its text."""


def _stages(config: Config) -> Iterator[_Row]:
    zero, stage = config.zero_optimization, STAGES[config.zero_optimization.stage]
    optimizer = zero.offload_optimizer
    yield (
        "a secondary copy below stage 3",
        zero.zero_hpz_partition_size > 1 and not stage.shards_parameters,
        "zero_optimization.zero_hpz_partition_size: only stage 3 divides the weights; set stage to "
        "3, or remove it",
    )
    for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights"):
        yield (
            "rounded weights below stage 3",
            getattr(zero, name) and not stage.shards_parameters,
            f"zero_optimization.{name}: only stage 3 gathers weights for every use; set stage to "
            "3, or remove it",
        )
    yield (
        "an offloaded optimizer at stage 0",
        optimizer.device != NONE and not stage.shards_optimizer,
        "zero_optimization.offload_optimizer: at stage 0 every rank holds all of the optimizer's "
        "state; set stage to 1, 2 or 3",
    )
    yield (
        "a part of the optimizer offloaded below stage 3",
        optimizer.device != NONE and optimizer.ratio < 1 and not stage.shards_parameters,
        f"zero_optimization.offload_optimizer.ratio: {optimizer.ratio} needs stage 3; set stage to "
        "3, or ratio to 1",
    )
    yield (
        "weights that arrive later at stage 3",
        config.elastic.overlap_param_gather and stage.shards_parameters,
        "elastic.overlap_param_gather: stage 3 does so already: it gathers the weights of each "
        "module while the module before it computes; remove the key",
    )
    yield (
        "weights that arrive later at stage 0",
        config.elastic.overlap_param_gather and not stage.shards_optimizer,
        "elastic.overlap_param_gather: at stage 0 every rank steps all weights, and none are "
        "gathered; set zero_optimization.stage to 1 or 2, or remove the key",
    )


def _reduction(config: Config) -> Iterator[_Row]:
    elastic, where = config.elastic, config.elastic.accumulate
    yield (
        "int8 sums by the backend",
        elastic.is_native and config.zero_optimization.zero_quantized_gradients,
        'zero_optimization.zero_quantized_gradients: not with elastic.reduction "native", whose '
        "sums are made by the backend, which knows no int8; remove one of the two",
    )
    yield "sums of nodes by the backend", elastic.is_native and where == Where.NODE, BY_BACKEND
    yield (
        "local sums of sharded gradients",
        where == Where.LOCAL and STAGES[config.zero_optimization.stage].shards_gradients,
        SHARDED.format(f"stage {config.zero_optimization.stage}", "stage 0 or 1"),
    )


def _precision(config: Config) -> Iterator[_Row]:
    autocast, types, compute = config.torch_autocast, config.data_types, config.compute
    yield (
        "two precisions",
        config.fp16.enabled and config.bf16.enabled,
        "fp16 and bf16 are both enabled; keep one",
    )
    yield (
        "autocast to another precision",
        autocast.enabled and compute not in ("fp32", autocast.compute),
        f"{compute} and torch_autocast with {autocast.dtype} are both enabled; keep one",
    )
    yield (
        "parameters of another precision",
        types.params not in (None, compute),
        f"data_types.param_dtype: {types.param_dtype!r}, but the model computes in {compute}; set "
        "bf16.enabled or fp16.enabled, or remove it",
    )
    yield (
        "moments below their masters",
        config.moments != "fp32" and config.master == "fp32",
        "bf16.bf16_optimizer_states: needs bf16.bf16_master_weights_and_grads; set that to true as "
        "well",
    )
    yield (
        "masters in 16 bits at stage 0",
        config.master != "fp32" and not STAGES[config.zero_optimization.stage].shards_optimizer,
        f"{config.master}.{config.master}_master_weights_and_grads: not at stage 0; set "
        "zero_optimization.stage to 1, which costs nothing",
    )
