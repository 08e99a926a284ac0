"""DeepSpeed's `deepspeed.runtime`: the modules that scripts import from, or name in full."""

from typing import TYPE_CHECKING

from zero_deepspeed.absent_names import raising_getattr
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

if not TYPE_CHECKING:  # for which every name would be there
    __getattr__ = raising_getattr(__name__)
