"""DeepSpeed's `deepspeed.runtime.utils`: the functions that scripts use."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.distributed as dist

from zero_deepspeed.accelerator import get_accelerator
from zero_deepspeed.utils.logging import logger

__all__ = ["see_memory_usage", "set_random_seed"]

_GIB = 1 << 30


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the memory of rank 0, now and at its peak; as in DeepSpeed only with `force`."""
    if force and not (dist.is_initialized() and dist.get_rank()):
        device = get_accelerator()
        now, peak = device.memory_allocated(), device.max_memory_allocated()
        logger.info("%s: %.2f GiB in use, at most %.2f GiB", message, now / _GIB, peak / _GIB)


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy and torch, as scripts do before they make a model."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
