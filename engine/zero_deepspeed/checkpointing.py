"""DeepSpeed's `deepspeed.checkpointing`: activation checkpointing of a function of the script.

The settings are one for the process: those of the last config that has the section
"activation_checkpointing", or of `configure`. What they mean is in `zero_engine.core.activations`.

Source: deepspeed.runtime.activation_checkpointing.checkpointing.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zero_contract.errors import ConfigError
from zero_engine.config import load_config
from zero_engine.config.schema import ActivationCheckpointing
from zero_engine.core import activations

__all__ = [
    "checkpoint",
    "configure",
    "is_configured",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]

_log = logging.getLogger(__name__)

_WITHOUT_EFFECT = {
    "partition_activations": "there is no model parallelism to divide activations among",
    "contiguous_checkpointing": "torch's allocator keeps memory in large blocks",
    "num_checkpoints": "memory is allocated as it is needed",
    "synchronize": "a wait for the device at each boundary only takes time",
    "profile": "torch.profiler shows what is recomputed",
}
"""Argument of `configure` -> why it has no effect."""


class _State:
    settings: ActivationCheckpointing | None = None


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, of which is kept for backward what the settings say: its inputs."""
    return activations.run(_State.settings or ActivationCheckpointing(), function, *args)


non_reentrant_checkpoint = checkpoint


def configure(
    mpu_: Any = None,
    deepspeed_config: Mapping[str, Any] | str | Path | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set what `checkpoint` keeps; `zero_deepspeed.initialize` does so from its config.

    Args:
        mpu_: Without effect: there is no model parallelism.
        deepspeed_config: A config, of which the section "activation_checkpointing" is used.
        partition_activations: Without effect.
        contiguous_checkpointing: Without effect.
        num_checkpoints: Without effect.
        checkpoint_in_cpu: Keep inputs in host memory; None: as the config says.
        synchronize: Without effect.
        profile: Without effect.

    Raises:
        ConfigError: `contiguous_checkpointing` without `num_checkpoints`, as in DeepSpeed; or the
            config is wrong.
    """
    del mpu_
    given = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "synchronize": synchronize,
        "profile": profile,
    }
    if contiguous_checkpointing and num_checkpoints is None and deepspeed_config is None:
        raise ConfigError("checkpointing.configure: contiguous_checkpointing needs num_checkpoints")
    for name, value in given.items():
        if value:
            _log.info("checkpointing.configure: %s has no effect: %s", name, _WITHOUT_EFFECT[name])
    settings = ActivationCheckpointing()
    if deepspeed_config is not None:
        settings = load_config(deepspeed_config).activation_checkpointing
    if checkpoint_in_cpu is not None:
        settings = dataclasses.replace(settings, cpu_checkpointing=checkpoint_in_cpu)
    use(settings)


def use(settings: ActivationCheckpointing) -> None:
    """Let `checkpoint` keep what these settings say."""
    _State.settings = settings


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Do nothing: there is no model parallelism to divide activations among."""
    del partition_activation


def set_num_layers(nlayers: int) -> None:
    """Do nothing: memory is allocated as it is needed."""
    del nlayers


def is_configured() -> bool:
    """Whether `configure` was called, or an engine was made."""
    return _State.settings is not None


def reset() -> None:
    """Do nothing: no buffer is kept between two steps."""
