"""Habits of scripts, in a table: each has torch's bits at every place, or is refused by name."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.numerics.promises.back_ends import Place, Recipe, by_torch_alone, everywhere
from tests.numerics.promises.habits import (
    LOADING,
    Box,
    Narrow,
    Noise,
    Residual,
    Returns,
    Told,
    Twins,
    Weighted,
    WithInPlace,
    adam,
    anomalous,
    as_output,
    assigned_state,
    at,
    by_module_hook,
    by_step_hook,
    bypassing,
    clamped_between,
    clamps,
    clamps_after,
    clears_state,
    edits_groups,
    evaluate,
    foreign_group,
    functional,
    grouped,
    grow,
    grows,
    hooked,
    loads_state,
    moves,
    new_dictionaries,
    new_head,
    new_head_alone,
    parametrizes,
    parametrizes_plainly,
    penalty_on_gradients,
    penalty_on_input,
    per_sample,
    reloads_state,
    retained,
    reversed_groups,
    sgd,
    strict,
    takes_away,
    tells,
    tied_after_optimizer,
    tied_late,
    ties,
    twice_called,
    unpacked,
    weight_penalty,
    wide,
    zeroed,
    zeroes_state,
)
from tests.support.world import WorldPool

PLAIN: Place = ("plain", 1)
FEW: list[Place] = [PLAIN, ("ddp", 2), ("fsdp2", 2), ("stage0", 2), ("stage3", 2)]
OTHERS: list[Place] = [PLAIN, ("fsdp2", 1), ("stage0", 2), ("stage1", 1), ("stage2", 3)]
STOCK = ("plain", "ddp", "fsdp2")
STAGES = ("stage0", "stage1", "stage2", "stage3")

HABITS: dict[str, Recipe] = {
    # the process
    "float64 is the default": Recipe(model=Narrow, within=wide),
    "float64 is the default, clipped": Recipe(model=Narrow, within=wide, max_norm=100.0),
    "deterministic algorithms": Recipe(within=strict),
    "anomalies are detected": Recipe(within=anomalous),
    # evaluations
    "evaluates between micro-steps": Recipe(between=evaluate),
    "infers between micro-steps": Recipe(between=partial(evaluate, how=torch.inference_mode)),
    # modules
    "weight norm": Recipe(model=partial(Weighted, "new")),
    "weight norm of old": Recipe(model=partial(Weighted, "old")),
    "a function in place": Recipe(model=WithInPlace),
    "returns a dataclass": Recipe(model=partial(Returns, as_output), loss=unpacked),
    "returns an object": Recipe(model=partial(Returns, Box), loss=unpacked),
    "calls the model twice": Recipe(model=Residual, loss=twice_called),
    "twice in autocast": Recipe(model=Residual, loss=twice_called, precision="autocast"),
    "a penalty on slopes": Recipe(model=Residual, loss=penalty_on_input),
    "a penalty on gradients": Recipe(model=Residual, loss=penalty_on_gradients),
    "a penalty on weights": Recipe(model=Residual, loss=weight_penalty),
    "goes around the wrapper": Recipe(model=Residual, loss=bypassing),
    "a functional call": Recipe(model=Residual, loss=functional),
    "by sample": Recipe(model=Residual, loss=per_sample),
    "retains a gradient": Recipe(loss=retained),
    # in the middle of a run
    "a new head": Recipe(before=at(1, new_head)),
    "a new head that is not trained": Recipe(before=at(1, new_head_alone)),
    "a foreign group": Recipe(before=at(1, foreign_group)),
    "parametrizes": Recipe(before=at(1, parametrizes)),
    "parametrizes plainly": Recipe(before=at(1, parametrizes_plainly)),
    "ties": Recipe(model=Twins, before=at(1, ties)),
    "tied late": Recipe(optimizer=tied_late, model=Twins),
    "tied after the optimizer": Recipe(optimizer=tied_after_optimizer, model=Twins),
    "loads a state": Recipe(before=at(1, loads_state)),
    "assigns a state": Recipe(before=at(1, assigned_state)),
    "moves there and back": Recipe(before=at(1, moves)),
    # optimizers
    "groups": Recipe(optimizer=grouped),
    "grows": Recipe(optimizer=grows, before=at(1, grow)),
    "clears the state": Recipe(optimizer=adam, before=at(1, clears_state)),
    "zeroes the state": Recipe(optimizer=adam, before=at(1, zeroes_state)),
    "reloads the state": Recipe(optimizer=adam, before=at(1, reloads_state)),
    "edits groups": Recipe(optimizer=adam, before=at(1, edits_groups)),
    "new dictionaries": Recipe(optimizer=adam, before=at(1, new_dictionaries)),
    "reverses groups": Recipe(optimizer=adam, before=at(1, reversed_groups)),
    # hooks
    "a gradient hook": Recipe(optimizer=partial(hooked, clamps)),
    "a hook behind": Recipe(optimizer=partial(hooked, clamps_after)),
    "a hook that takes away": Recipe(optimizer=partial(hooked, takes_away)),
    "clamps between": Recipe(between=clamped_between),
    "a step hook": Recipe(optimizer=by_step_hook),
    "a module hook": Recipe(optimizer=by_module_hook),
    "zeroes first": Recipe(loss=partial(zeroed, True), own_loop=True),
    "zeroes in place": Recipe(loss=partial(zeroed, False), own_loop=True),
    # data
    "loading processes": Recipe(data=Noise, of_loader=LOADING, workers=2),
    "tells the data the step": Recipe(data=Told, before=tells, workers=2),
}
NOT_IN_TORCH = {
    "returns an object": {"ddp"},
    "a penalty on slopes": {"fsdp2"},
    "a penalty on weights": {"fsdp2"},
    "clamps between": {*STAGES},
}
"""What torch itself refuses there, or, of `.grad` under the engine, there is nothing to clamp."""
AROUND = "and not its .module"
EXCHANGED = "another parameter than at"
FOREIGN = "parameters that are not the model's"
GROUPS = "what is added later is not trained"
HOOKED = "has a gradient hook of the script"
NOT_GATHERED = "fully_shard does not know the parameter at"
NOT_REDUCED = "DistributedDataParallel does not see the gradient of"
TAKEN = "has taken the gradient of"
REFUSED: dict[str, dict[str, str]] = {
    "a penalty on gradients": {"fsdp2": "a backward with create_graph=True"},
    "goes around the wrapper": {"ddp": AROUND},
    "a functional call": {"ddp": AROUND},
    "by sample": {"ddp": AROUND},
    "a new head": {**dict.fromkeys(STOCK, EXCHANGED), **dict.fromkeys(STAGES, GROUPS)},
    "a new head that is not trained": dict.fromkeys((*STOCK, *STAGES), EXCHANGED),
    "a foreign group": {**dict.fromkeys(STOCK, FOREIGN), **dict.fromkeys(STAGES, GROUPS)},
    "parametrizes": {**dict.fromkeys((*STOCK, *STAGES[:3]), EXCHANGED)},
    "parametrizes plainly": {"ddp": NOT_REDUCED, "fsdp2": NOT_GATHERED},
    "ties": dict.fromkeys((*STOCK, *STAGES), EXCHANGED),
    "tied late": {"ddp": NOT_REDUCED, "fsdp2": NOT_GATHERED},
    "tied after the optimizer": {
        **dict.fromkeys(STOCK, FOREIGN),
        **dict.fromkeys(STAGES, "is not one of the model's"),
    },
    "loads a state": {"stage3": "load_state_dict() at stage 3"},
    "assigns a state": {
        **dict.fromkeys((*STOCK, *STAGES), EXCHANGED),
        "stage3": "load_state_dict() at stage 3",
    },
    "moves there and back": {
        "ddp": "DistributedDataParallel has not reduced",
        **dict.fromkeys(STAGES[:3], "has other memory than at initialize()"),
        "stage3": "up.weight is divided",
    },
    "grows": dict.fromkeys(STAGES, GROUPS),
    "a gradient hook": {"fsdp2": HOOKED},
    "a hook behind": {"fsdp2": HOOKED},
    "a hook that takes away": {**dict.fromkeys((*STOCK, *STAGES), TAKEN), "fsdp2": HOOKED},
}
"""What is said instead."""
OTHER_NAMES = {"parametrizes plainly"}
"""The engine keeps the names of parameters that a hash has."""
OTHER_NUMBERS = {"loading processes", "float64 is the default", "float64 is the default, clipped"}
"""Torch alone seeds nothing, or has other data."""


@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("chosen", [FEW, OTHERS], ids=["few", "others"])
@pytest.mark.corners(
    chosen=[FEW],
    habit=[
        "infers between micro-steps",
        "twice in autocast",
        "a new head",
        "tied late",
        "a hook that takes away",
    ],
)
def test_a_habit_has_the_bits_of_torch_alone_or_is_refused_by_name(
    worlds: WorldPool, tmp_path: Path, habit: str, chosen: list[Place]
) -> None:
    recipe = HABITS[habit]
    if recipe.optimizer is Recipe().optimizer:
        recipe = replace(recipe, optimizer=sgd)
    absent, refused = NOT_IN_TORCH.get(habit, ()), REFUSED.get(habit, {})
    if habit == "parametrizes":  # of stage 3 torch says it by itself
        absent = {"stage3"}
    places = [place for place in chosen if place[0] not in absent]
    found = {}
    for place in places:  # each goes on from its own checkpoint
        found |= everywhere(worlds, recipe, tmp_path / str(place), [place])
    expected = found["plain", 1]
    if habit not in OTHER_NUMBERS and "plain" not in refused:
        assert [expected] == worlds.run(1, by_torch_alone, recipe)
    for (back_end, world), hashes in found.items():
        if back_end in refused:
            assert refused[back_end] in hashes[-1], (back_end, world)
        elif back_end in STAGES and habit in OTHER_NAMES:
            assert hashes == found["stage0", 2]
        else:
            assert (hashes, len(hashes)) == (expected, 4), (back_end, world)
