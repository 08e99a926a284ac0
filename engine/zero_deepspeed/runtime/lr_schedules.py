"""DeepSpeed's `deepspeed.runtime.lr_schedules`."""

from zero_engine.optim.lr_schedules import (
    BY_NAME,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

__all__ = [
    "VALID_LR_SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
]

VALID_LR_SCHEDULES = list(BY_NAME)
