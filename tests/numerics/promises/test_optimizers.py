"""Every class of torch.optim under zero_torch: torch's bits everywhere, or a refusal by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.numerics.promises.back_ends import STOCK, Net, Recipe, by_torch_alone, everywhere
from tests.support.torch_optimizers import OPTIONS, classes
from tests.support.world import WorldPool

KERNELS: dict[str, list[dict[str, Any]]] = {
    "Adagrad": [{"fused": True}],
    "Adam": [{"fused": True, "amsgrad": True}],
    "AdamW": [{"fused": True}, {"lr": torch.tensor(0.1)}],
    "Muon": [{}, {"nesterov": False, "weight_decay": 0.0, "ns_steps": 3}],
    "SGD": [{}, {"fused": True, "momentum": 0.9}],
}
"""What the engine's table does not have."""
REFUSED = {
    "Adafactor": "Adafactor keeps state in other shapes than its parameters",
    "LBFGS": "LBFGS calls the model again within a step",
    "SparseAdam": "SparseAdam takes sparse gradients",
}
CASES = [
    (name, each)
    for table in (OPTIONS, KERNELS)
    for name in table.keys() - REFUSED.keys()
    for each in table[name]
]
CASES.sort(key=str)


def test_every_class_of_torch_is_accounted_for() -> None:
    assert classes() == {name for name, _ in CASES} | REFUSED.keys()


def made(name: str, options: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(trained, **{"lr": 0.1, **options})
    return optimizer


def matrices() -> nn.Module:
    """A model whose matrices are trained."""
    model = Net()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 2)
    return model


def recipe_of(name: str, options: dict[str, Any]) -> Recipe:
    model: Callable[[], nn.Module] = matrices if name == "Muon" else Net
    return Recipe(model=model, optimizer=partial(made, name, options))


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.corners(name=["Muon"], options=KERNELS["Muon"][:1])
def test_its_bits_are_those_of_torch_alone_or_it_is_refused(
    worlds: WorldPool, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    unfused = {"fused": False, "foreach": True} if options.get("fused") else {}
    (expected,) = worlds.run(1, by_torch_alone, recipe_of(name, options | unfused))
    found = everywhere(worlds, recipe_of(name, options), tmp_path)
    for (back_end, world), hashes in found.items():
        if name == "Muon" and back_end in ("fsdp2", "hsdp"):
            assert f"ConfigError: {name} looks at whole parameters" in hashes[0]
        else:
            assert hashes == expected, (back_end, world)


@pytest.mark.parametrize("name", REFUSED)
def test_one_that_cannot_step_or_be_saved_is_refused_by_name(
    worlds: WorldPool, tmp_path: Path, name: str
) -> None:
    found = everywhere(worlds, recipe_of(name, {}), tmp_path, [("plain", 1)])
    assert found["plain", 1][0].startswith(f"ConfigError: {REFUSED[name]}")


class Own(torch.optim.SGD):
    """An optimizer of the script's own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def own(says: bool | None, model: nn.Module) -> torch.optim.Optimizer:
    optimizer = Own(model.parameters(), lr=0.1)
    optimizer.needs_whole_parameters = says  # type: ignore[attr-defined]
    return optimizer


def test_one_of_the_scripts_own_has_to_say_whether_shards_suffice(
    worlds: WorldPool, tmp_path: Path
) -> None:
    unknown, shards = Recipe(optimizer=partial(own, None)), Recipe(optimizer=partial(own, False))
    (expected,) = worlds.run(1, by_torch_alone, unknown)
    places = [("ddp", 2), ("fsdp2", 2)]
    found = everywhere(worlds, unknown, tmp_path / "unknown", places)
    assert found["ddp", 2] == expected
    assert "set its attribute needs_whole_parameters = False" in found["fsdp2", 2][0]
    found = everywhere(worlds, shards, tmp_path / "shards", places)
    assert found == dict.fromkeys(places, expected)


class Counts(torch.optim.Optimizer):
    """An optimizer that divides its rate by a count, and keeps no tensors of its own."""

    needs_whole_parameters = False

    def __init__(self, where: str, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.where = where
        if where == "an object":
            self.state["count"] = {"of": 0}  # type: ignore[index]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step once."""
        states: Any = self.state
        if self.where in BESIDE:
            key, first = BESIDE[self.where]
            states[key] = states.get(key, first) + 1
        for group in self.param_groups:
            for each in group["params"]:
                if self.where in BESIDE:
                    count = states[key]
                else:
                    first = torch.zeros(()) if self.where == "tensor" else 0
                    count = states[each]["count"] = states[each].get("count", first) + 1
                each.sub_(each.grad * (group["lr"] / float(count)))


BESIDE: dict[str, tuple[Any, Any]] = {
    "one number": ("count", 0),
    "one tensor": ("count", torch.zeros(())),
    "no text": (("a", "count"), 0),
}
"""Under which key, and what it begins with."""


@pytest.mark.parametrize("where", ["int", "tensor", "one number", "one tensor"])
@pytest.mark.corners(where=["int", "one number"])
def test_numbers_that_are_all_of_its_state_come_back(
    worlds: WorldPool, tmp_path: Path, where: str
) -> None:
    recipe = Recipe(optimizer=partial(counting, where))
    (expected,) = worlds.run(1, by_torch_alone, recipe)
    places = [("plain", 1), ("ddp", 2), ("fsdp2", 2)]
    assert everywhere(worlds, recipe, tmp_path, places) == dict.fromkeys(places, expected)


def counting(where: str, model: nn.Module) -> torch.optim.Optimizer:
    return Counts(where, model.parameters())


@pytest.mark.parametrize(
    ("where", "why"), [("no text", "has the key ('a', 'count')"), ("an object", "count is a dict")]
)
def test_state_beside_parameters_that_no_checkpoint_can_hold_is_refused_by_name(
    worlds: WorldPool, tmp_path: Path, where: str, why: str
) -> None:
    recipe = Recipe(optimizer=partial(counting, where))
    found = everywhere(worlds, recipe, tmp_path, [("plain", 1)])["plain", 1]
    assert found[-1].startswith("CheckpointError: ")
    assert f"optimizer state {why}" in found[-1]


HOW = ("nothing", "accelerate", "zero", "averaged")


def prepared(how: str, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that a library has wrapped."""
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if how == "nothing":
        return inner
    if how == "accelerate":
        from accelerate import Accelerator

        found: torch.optim.Optimizer = Accelerator(cpu=True).prepare_optimizer(inner)
        return found
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

    if how == "zero":
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    return PostLocalSGDOptimizer(inner, None)  # type: ignore[arg-type]


@pytest.mark.full
def test_one_that_a_library_has_wrapped_is_unwrapped_or_refused(
    worlds: WorldPool, tmp_path: Path
) -> None:
    recipes = {how: Recipe(optimizer=partial(prepared, how), own_loop=True) for how in HOW}
    (expected,) = worlds.run(1, by_torch_alone, recipes["nothing"])
    found = {
        how: everywhere(worlds, recipe, tmp_path / how, [("ddp", 2)])["ddp", 2]
        for how, recipe in recipes.items()
    }
    assert found["nothing"] == found["accelerate"] == expected
    assert "ZeroRedundancyOptimizer divides its state" in found["zero"][0]
    assert "PostLocalSGDOptimizer is no optimizer of torch" in found["averaged"][0]


def test_hsdp_is_among_the_places() -> None:
    assert {"plain", "ddp", "fsdp2", "hsdp"} == {back_end for back_end, _ in STOCK}
