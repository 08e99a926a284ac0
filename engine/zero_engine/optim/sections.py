"""Checks the sections "optimizer" and "scheduler" of a config without a model.

Must always hold: what `initialize` would refuse of them is refused here, in the same words,
because the same functions make them.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from zero_comm.topology import alone
from zero_contract.sections import AUTO
from zero_engine.config import Config, OptimizerConfig, SchedulerConfig
from zero_engine.layout import Facts, resolve
from zero_engine.optim.lr_schedules import make_schedule
from zero_engine.optim.optimizers import describe, make_optimizer


def check_sections(config: Config) -> None:
    """Make the optimizer and the schedule of a config, for the smallest model.

    Raises:
        ConfigError: As `initialize` does, for what does not depend on the model.
    """
    schedule = config.scheduler or SchedulerConfig()
    if schedule.params.get("total_num_steps") == AUTO:  # a library fills it in, which knows it
        schedule = replace(schedule, params={**schedule.params, "total_num_steps": 1})
    # A schedule with a list of rates has one for each param group.
    rates = (len(each) for each in schedule.params.values() if isinstance(each, list))
    layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(max(rates, default=1)))
    groups = [{"params": list(layer.parameters())} for layer in layers]
    section = config.optimizer or OptimizerConfig(type="SGD")  # the script makes its optimizer
    optimizer = make_optimizer(None, section, groups, layers)
    assert optimizer is not None
    resolve(config, Facts(topology=alone(1), optimizer=describe(optimizer)))
    make_schedule(schedule, optimizer)
