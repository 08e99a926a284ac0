"""The sections "optimizer" and "scheduler" of a config, tried before there is a model.

Must always hold: what `initialize` would refuse of them is refused here, in the same words,
because the same functions make them.

Called by `python -m zero_engine`.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from zero_engine.config import Config, OptimizerConfig, SchedulerConfig
from zero_engine.config.parse import AUTO
from zero_engine.optim.lr_schedules import make_schedule
from zero_engine.optim.optimizers import check_whole, make_optimizer, needs_whole


def check_sections(config: Config) -> None:
    """Make the optimizer and the schedule of a config, for a model of nothing much.

    Raises:
        ConfigError: As `initialize` does, for what does not depend on the model.
    """
    schedule = _filled_in(config.scheduler or SchedulerConfig())
    layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(_groups(schedule)))
    groups = [{"params": list(layer.parameters())} for layer in layers]
    section = config.optimizer or OptimizerConfig(type="SGD")  # the script has one of its own
    optimizer = make_optimizer(None, section, groups, layers)
    assert optimizer is not None
    if needs_whole(optimizer):
        check_whole(optimizer, config)
    make_schedule(schedule, optimizer)


def _filled_in(schedule: SchedulerConfig) -> SchedulerConfig:
    """With a number of steps, where a library that knows it fills it in."""
    steps = "total_num_steps"
    if schedule.params.get(steps) != AUTO:
        return schedule
    return replace(schedule, params={**schedule.params, steps: 1})


def _groups(schedule: SchedulerConfig) -> int:
    """As many param groups as a schedule has rates for."""
    return max(
        (len(each) for each in schedule.params.values() if isinstance(each, list)), default=1
    )
