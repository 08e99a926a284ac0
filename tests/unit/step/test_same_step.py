"""The options of an optimizer in a step, of which a script may replace some in each."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn

from zero_step.checks.same_step import OptionsOfStep, SameStep


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


def test_what_is_no_number_on_all_ranks_does_not_differ() -> None:
    """Beside it another option may: that one is named."""

    def everybodys(row: Tensor, _what: str) -> Tensor:
        return torch.stack([row, row])

    groups = SimpleNamespace(everybodys=everybodys)
    same = SameStep(cast(Any, None), cast(Any, None), cast(Any, groups))
    same._compare([{"lr": math.nan, "betas": [0.9, math.nan]}])
