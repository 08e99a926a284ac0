"""What zero_torch cannot keep its promises for is refused, with the reason and the remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from zero_comm.sums.plan import Where
from zero_contract.errors import ConfigError
from zero_step.options import Elastic
from zero_torch import settings
from zero_torch.optimizers.supported import check_members, step_without_fusion
from zero_torch.wrapped import (
    Wrapper,
    check_gradients,
    check_sums,
    own_name,
    recognize,
    shard_problem,
)


def test_a_model_that_is_not_distributed_is_refused_with_several_ranks() -> None:
    wrapped = recognize(nn.Linear(2, 2))
    assert wrapped.wrapper is Wrapper.PLAIN
    check_gradients(wrapped, 1)
    with pytest.raises(ConfigError, match=r"there are 2 ranks and the model is not distributed"):
        check_gradients(wrapped, 2)


def test_a_parameter_that_fully_shard_has_left_out_is_refused() -> None:
    assert "call fully_shard on the root module" in str(shard_problem(torch.zeros(2), 2))


@pytest.mark.parametrize(
    ("wrapper", "options", "problem"),
    [
        (Wrapper.FSDP2, {"accumulate": Where.LOCAL}, r"which FSDP2 shards; use Distributed"),
        (Wrapper.DDP, {"accumulate": Where.NODE, "reduction": "native"}, r"remove one of the two"),
        (Wrapper.DDP, {"accumulate": Where.LOCAL}, r"in fp32 .*, and bias is float64; use \"owner"),
    ],
)
def test_sums_that_cannot_be_made_before_they_are_sent_are_refused(
    wrapper: Wrapper, options: Any, problem: str
) -> None:
    model = nn.Linear(2, 2)
    model.bias.data = model.bias.data.double()
    wrapped = replace(recognize(model), wrapper=wrapper)
    with pytest.raises(ConfigError, match=problem):
        check_sums(wrapped, Elastic(**options))
    ddp = replace(wrapped, wrapper=Wrapper.DDP)
    check_sums(ddp, Elastic(accumulate=Where.LOCAL, reduction="native"))
    check_sums(ddp, Elastic())


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    trained = dict(model.named_parameters())
    with pytest.raises(ConfigError, match=r"SGD has 2 parameters that are not the model's"):
        check_members(torch.optim.SGD(other.parameters()), trained)
    with pytest.raises(ConfigError, match=r"bias is trained and SGD does not have it"):
        check_members(torch.optim.SGD([model.weight]), trained)
    check_members(torch.optim.SGD(model.parameters()), trained)


def test_a_fused_optimizer_steps_with_the_bits_of_foreach() -> None:
    weights = []
    for kernel in ("fused", "foreach"):
        torch.manual_seed(0)
        model = nn.Linear(3, 5)
        optimizer = torch.optim.AdamW(model.parameters(), **{kernel: True})
        assert step_without_fusion(optimizer) == (kernel == "fused")
        model(torch.ones(3)).square().sum().backward()
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        weights.append(model.weight.detach())
    assert torch.equal(*weights)


def test_the_config_has_the_sections_of_the_engine() -> None:
    read = settings.read({"checkpoint": {"async": True, "ram": {}}, "elastic": {"seed": 3}})
    assert read.checkpoint.asynchronous
    assert read.checkpoint.ram is not None
    assert (read.elastic.seed, read.elastic.reduction_block) == (3, None)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"checkpoints": {}}, "checkpoints: .*; did you mean 'checkpoint'"),
        ({"checkpoint": {"keep_lst": 2}}, "checkpoint.keep_lst: .*; did you mean 'keep_last'"),
        ({"elastic": {"reduction_block": 6}}, "not a power of two"),
        ({"elastic": 3}, "elastic: 3 is not an object"),
        ({"checkpoint": {"every_steps": "soon"}}, "every_steps: 'soon' is not an integer"),
    ],
)
def test_a_wrong_config_is_refused(config: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        settings.read(config)


def test_wrappers_leave_no_trace_in_names() -> None:
    name = "_orig_mod.blocks.0._checkpoint_wrapped_module.up.weight"
    assert own_name(name) == "blocks.0.up.weight"
