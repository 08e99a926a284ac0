"""DeepSpeed's `deepspeed.runtime.lr_schedules`.

Beside the schedules, it has constants for their names and those of their params, which scripts
write into configs.
"""

from zero_engine.optim.lr_schedules import (
    BY_NAME,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]

VALID_LR_SCHEDULES = list(BY_NAME)
LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = BY_NAME
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"
_PARAMS = """
    lr_schedule lr_range_test_min_lr lr_range_test_step_rate lr_range_test_step_size
    lr_range_test_staircase edge_value mid_value cycle_first_step_size cycle_first_stair_count
    cycle_second_step_size cycle_second_stair_count decay_step_size cycle_min_lr cycle_max_lr
    decay_lr_rate cycle_min_mom cycle_max_mom decay_mom_rate warmup_min_lr warmup_max_lr
    warmup_num_steps warmup_type warmup_min_ratio cos_min_ratio total_num_steps
"""
globals().update({name.upper(): name for name in _PARAMS.split()})
