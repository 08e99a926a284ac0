"""The options of an optimizer in a step, of which a script may replace some in each."""

from __future__ import annotations

from weakref import ref

import torch
from torch import Tensor, nn

from zero_step.checks.same_step import OptionsOfStep


def test_an_option_that_a_script_has_replaced_takes_no_memory() -> None:
    """A learning rate that is a new tensor in each step: on a GPU each has a block of its own."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=torch.tensor(0.5))
    options, rates = OptionsOfStep(optimizer), list[ref[Tensor]]()
    for step in range(3):
        optimizer.param_groups[0]["lr"] = torch.tensor(0.5 / (step + 1))
        rates.append(ref(optimizer.param_groups[0]["lr"]))
        options.begin()
        assert options.change() == ""
    assert [rate() is None for rate in rates] == [True, True, False]
