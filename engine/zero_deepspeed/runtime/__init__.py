"""DeepSpeed's `deepspeed.runtime`: the modules that scripts import from, or name in full."""

from zero_deepspeed.runtime import (
    activation_checkpointing,
    base_optimizer,
    config,
    dataloader,
    engine,
    lr_schedules,
    utils,
    zero,
)

__all__ = [
    "activation_checkpointing",
    "base_optimizer",
    "config",
    "dataloader",
    "engine",
    "lr_schedules",
    "utils",
    "zero",
]
