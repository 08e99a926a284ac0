"""Any combination of what scripts do has one hash at every step, in every back end and world.

The other tables of this folder have one habit in each row. Here hypothesis draws a script from all
of them at once, the places where it runs, and who goes on from whose checkpoint. Scripts of stock
PyTorch, which may have any data and see gradients, also draw random numbers wherever they can.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from tests.numerics.promises import habits
from tests.numerics.promises import test_beside_training as beside
from tests.numerics.promises import test_own_draws as own_draws
from tests.numerics.promises.back_ends import (
    EVERYWHERE,
    IN,
    Net,
    Recipe,
    by_torch_alone,
    data,
    everywhere,
)
from tests.numerics.promises.test_schedulers import MADE
from tests.support.torch_optimizers import OPTIONS
from tests.support.world import WorldPool


class Normalized(Net):
    """Has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(13)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.repeat(2, 1))  # a micro-batch may have one sample


class Seldom(Net):
    """Has what only some micro-batches use, and what none does."""

    def __init__(self) -> None:
        super().__init__()
        self.extra, self.idle = nn.Linear(IN, IN), nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.tanh(self.extra(x)) if float(x[0, 0]) > 0 else x)


class Again(Net):
    """Computes its activations again."""

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return loss


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.lstm, self.down = nn.Linear(IN, 8), nn.LSTM(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.up(x).repeat(3, 1, 1))
        return (self.down(hidden) - 1).square().mean()


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(IN, 8), nn.Linear(8, 1)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x).repeat(3, 1, 1)
        return (self.down(self.attention(x, x, x)[0]) - 1).square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "batch norm": Normalized,
    "seldom": Seldom,
    "again": Again,
    "recurrent": Recurrent,
    "attends": Attends,
    "twins": habits.Twins,
    "in place": habits.WithInPlace,
    "weight norm": partial(habits.Weighted, "new"),
    "weight norm of old": partial(habits.Weighted, "old"),
}
LOSSES = {"residual": habits.of_residual, "calls twice": habits.twice_called}
"""Computed with what `Residual` returns, instead of a model of the table."""


def slower(_: nn.Module, optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.7 * group["lr"]


EDITS = {
    "edits groups": habits.edits_groups,
    "zeroes the state": habits.zeroes_state,
    "clears the state": habits.clears_state,
    "reloads the state": habits.reloads_state,
    "new dictionaries": habits.new_dictionaries,
    "slower": slower,
}
REFUSED = {"Adafactor"}
OPTIMIZERS = [
    (name, number)
    for name in sorted(OPTIONS.keys() - REFUSED)
    for number in range(len(OPTIONS[name]))
]
OTHERS = {"ReduceLROnPlateau", "CyclicLR", "OneCycleLR"}
"""Schedulers that need a metric, or an optimizer with momentum."""
EVALUATIONS = {"": None, "evaluates": torch.no_grad, "infers": torch.inference_mode}
PROCESS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "": nullcontext,
    "strict": habits.strict,
    "anomalies": habits.anomalous,
}

SCRIPTS = st.fixed_dictionaries(
    {
        "model": st.sampled_from([*MODELS, *LOSSES]),
        "optimizer": st.sampled_from(OPTIMIZERS),
        "scheduler": st.sampled_from(["", *sorted(MADE.keys() - OTHERS)]),
        "edits": st.lists(st.tuples(st.integers(0, 3), st.sampled_from(sorted(EDITS))), max_size=2),
        "evaluation": st.sampled_from(sorted(EVALUATIONS)),
        "process": st.sampled_from(sorted(PROCESS)),
        "own_loop": st.booleans(),
        "max_norm": st.sampled_from([None, 0.05]),
        "counts": st.booleans(),
        "precision": st.sampled_from(["fp32", "autocast"]),
        "microbatches": st.sampled_from([1, 3, 5, 8]),
        "block": st.sampled_from([2, 8]),
        "workers": st.sampled_from([0, 0, 0, 1]),
        "nodes": st.sampled_from(["", "2,2", "3,1"]),
    }
)
PLACES = st.lists(st.sampled_from(EVERYWHERE[1:]), min_size=2, max_size=4, unique=True)


def optimizer(name: str, number: int, model: nn.Module) -> Optimizer:
    options = {"lr": 0.05, **OPTIONS[name][number]}
    made: Optimizer = getattr(torch.optim, name)(model.parameters(), **options)
    return made


def edited(edits: list[tuple[int, str]], model: Any, optimizer: Optimizer, step: int) -> None:
    for when, name in edits:
        if when == step:
            EDITS[name](model, optimizer)


def count(batch: Tensor) -> int:
    return 1 + int(10 * batch.abs().sum())


def recipe_of(script: dict[str, Any]) -> Recipe:
    evaluation = EVALUATIONS[script["evaluation"]]
    return Recipe(
        model=MODELS.get(script["model"], habits.Residual),
        loss=LOSSES.get(script["model"]),
        optimizer=partial(optimizer, *script["optimizer"]),
        scheduler=MADE.get(script["scheduler"]),
        before=partial(edited, script["edits"]),
        between=partial(habits.evaluate, how=evaluation) if evaluation else None,
        within=PROCESS[script["process"]],
        own_loop=script["own_loop"],
        max_norm=script["max_norm"],
        # A loop of its own has no place to say how many tokens a micro-batch has.
        counts=count if script["counts"] and not script["own_loop"] else None,
        precision=script["precision"],
        microbatches=script["microbatches"],
        units=(),
        workers=script["workers"],
        nodes=script["nodes"],
        sections={"elastic": {"reduction_block": script["block"]}},
    )


@settings(max_examples=30, phases=[Phase.generate])  # to shrink one takes minutes
@given(script=SCRIPTS, places=PLACES)
@pytest.mark.full
def test_any_script_has_one_hash_at_every_step_wherever_it_runs(
    worlds: WorldPool,
    tmp_path_factory: pytest.TempPathFactory,
    script: dict[str, Any],
    places: list[tuple[str, int]],
) -> None:
    recipe, root = recipe_of(script), tmp_path_factory.mktemp("script")
    if recipe.nodes:
        places = [place for place in places if place[1] in (1, 4)]
    found = everywhere(worlds, recipe, root, [("plain", 1), *places])
    expected = found["plain", 1]
    assert found == dict.fromkeys(found, expected)
    exact = recipe.precision == "fp32" and not (recipe.max_norm or recipe.counts)
    if exact and script["block"] == 8:
        assert worlds.run(1, by_torch_alone, recipe) == [expected]


DATA: dict[str, Callable[[], Any]] = {
    "numbers": data,
    "draws by the process": habits.Noise,
    "draws by its own": own_draws.OwnDraws,
    "draws by its class": partial(own_draws.Draws, own_draws.of_class),
    "draws by a module": partial(own_draws.Draws, own_draws.of_another_module),
    "draws by what it makes late": partial(own_draws.Draws, own_draws.made_late),
    "drawn by a sampler": own_draws.by_sampler,
    "a stream in its own order": own_draws.OwnOrder,
    "a stream that is shuffled at once": own_draws.Stream,
}
DRAWS = st.fixed_dictionaries(
    {
        "data": st.sampled_from(sorted(DATA)),
        "collate": st.sampled_from([None, own_draws.collated_late]),
        "between": st.sampled_from([None, beside.add_noise]),
        "before": st.sampled_from([None, beside.draw_a_rate]),
        "model": st.sampled_from([None, own_draws.Noisy, own_draws.DrawsToo]),
    }
)
OF_STOCK = [place for place in EVERYWHERE[1:] if not place[0].startswith(("stage", "offload"))]


@settings(max_examples=20, phases=[Phase.generate])
@given(
    script=SCRIPTS,
    draws=DRAWS,
    places=st.lists(st.sampled_from(OF_STOCK), min_size=2, max_size=3, unique=True),
)
@pytest.mark.full
def test_whatever_draws_random_numbers_in_a_script_of_stock_torch_draws_the_same_everywhere(
    worlds: WorldPool,
    tmp_path_factory: pytest.TempPathFactory,
    script: dict[str, Any],
    draws: dict[str, Any],
    places: list[tuple[str, int]],
) -> None:
    drawn = {key: each for key, each in draws.items() if each is not None}
    own = {"data": DATA[draws["data"]]} | ({"loss": None} if "model" in drawn else {})
    recipe, root = replace(recipe_of(script), **{**drawn, **own}), tmp_path_factory.mktemp("drawn")
    if recipe.nodes:
        places = [place for place in places if place[1] in (1, 4)]
    found = everywhere(worlds, recipe, root, [("plain", 1), *places])
    assert found == dict.fromkeys(found, found["plain", 1])
