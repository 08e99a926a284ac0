"""What is kept between forward and backward, and of which modules."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.models import make_model
from zero_contract.errors import ConfigError
from zero_engine.config import load_config
from zero_engine.config.schema import ActivationCheckpointing
from zero_engine.core import activations


class Calls(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def gradients(settings: ActivationCheckpointing | None) -> tuple[list[Tensor], Counter[str]]:
    """Of two layers with dropout, and the operators that their backward runs."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 8), nn.GELU())
    given = torch.randn(4, 8, requires_grad=True)
    output = layers(given) if settings is None else activations.run(settings, layers, given)
    with Calls() as calls:
        output.sum().backward()
    found = [param.grad for param in (given, *layers.parameters())]
    return [each for each in found if each is not None], calls.names


@pytest.mark.parametrize(
    ("policy", "to_host", "products", "activations_again"),
    [
        ("recompute", False, 2, 1),
        ("recompute", True, 2, 1),
        ("selective", False, 0, 1),
        ("selective", True, 0, 1),
        ("offload", False, 0, 0),
    ],
)
def test_a_policy_says_what_runs_again_and_changes_no_bit(
    policy: str, to_host: bool, products: int, activations_again: int
) -> None:
    plain, calls_before = gradients(None)
    settings = ActivationCheckpointing(policy=policy, cpu_checkpointing=to_host)
    found, calls = gradients(settings)
    assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))
    assert calls["addmm"] - calls_before["addmm"] == products
    assert calls["gelu"] - calls_before["gelu"] == activations_again


def test_parameters_and_their_views_stay_where_they_are() -> None:
    with torch.device("meta"):
        weight, activation = nn.Parameter(torch.ones(2, 3)), torch.ones(2, 3)
    assert [activations.goes_to_host(each) for each in (weight, weight.t(), activation)] == [
        False,
        False,
        True,
    ]
    assert not activations.goes_to_host(torch.ones(2))  # it is there


@pytest.mark.parametrize(
    ("rules", "names"),
    [
        (("Block",), ["blocks.0", "blocks.1"]),
        (("blocks.*.up", "blocks.1.down"), ["blocks.0.up", "blocks.1.up", "blocks.1.down"]),
        (("Block", "LayerNorm"), ["blocks.0", "blocks.1", "norm"]),  # and not those inside blocks
        (("TinyGPT", "Block"), [""]),
    ],
)
def test_modules_are_named_by_class_or_by_a_pattern_of_their_names(
    rules: tuple[str, ...], names: list[str]
) -> None:
    model = make_model()
    by_module = {module: name for name, module in model.named_modules()}
    assert [by_module[each] for each in activations.chosen(model, rules)] == names


def test_a_name_that_no_module_has_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"modules: no module .* 'Layer'; its classes are Block, "
    ):
        activations.chosen(make_model(), ("Layer",))


def test_a_model_that_is_copied_recomputes_the_copy() -> None:
    model = make_model()
    activations.apply(model, ActivationCheckpointing(modules=("Block",)))
    other = copy.deepcopy(model)
    assert other.blocks[0].forward.forward.__self__ is other.blocks[0]
    activations.apply(model, ActivationCheckpointing())
    assert "forward" not in vars(model.blocks[0])


def test_another_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match='\'none\' is not "recompute", "selective" or '):
        load_config({"activation_checkpointing": {"policy": "none"}})
