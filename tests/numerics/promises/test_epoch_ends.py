"""What a script does behind its loop over an epoch is done once for each, wherever it resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.numerics.promises.back_ends import PLACES, Place, Recipe, Training, agreed, training
from tests.support.lane_data import StatefulRows
from tests.support.world import WorldPool

EPOCHS, STEPS_IN_ONE = 2, 3


def rows() -> StatefulRows:
    """A stream; an epoch of 29 samples in 5 lanes."""
    return StatefulRows([*Recipe().data()])


RECIPES = {
    "map-style": Recipe(own_loop=True),
    "a loop by the run": Recipe(max_norm=0.05),
    "a stream": Recipe(data=rows),
}


def halves_rates(own: Training) -> None:
    """As a scheduler that is stepped once in an epoch."""
    for group in own.optimizer.param_groups:
        group["lr"] *= 0.5


def life(
    name: str, place: Place, load: str = "", save: str = "", at: int = 0, behind: bool = False
) -> list[str]:
    """The hash after each step, to the end or to one that is saved, in the loop or behind it."""
    own, found = training(RECIPES[name], place[0], weights=1 if load else 0), []
    if load:
        own.load(load)
    for _ in range(own.loader.epoch, EPOCHS):
        for (batch,) in own.loader:
            before = own.step
            own.backward(batch)
            own.end()
            found += [own.hash()] * (own.step - before)
            if own.step == at > before and not behind:
                own.save(save)
                own.close()
                return found
        halves_rates(own)
        if own.step == at and behind:
            own.save(save)
            break
    own.close()
    return found


@PLACES
@pytest.mark.parametrize("behind", [False, True], ids=["in the loop", "behind it"])
@pytest.mark.parametrize("at", [3, 6])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.corners(name=["map-style"], at=[3], behind=[False])
def test_a_rate_that_changes_behind_each_epoch_does_so_where_a_run_resumes_at_the_end_of_one(
    worlds: WorldPool, tmp_path: Path, name: str, at: int, behind: bool, places: list[Place]
) -> None:
    places = [place for place in places if name == "map-style" or place[0] != "hsdp"]
    (expected,) = worlds.run(1, life, name, ("plain", 1))
    assert len(expected) >= EPOCHS * STEPS_IN_ONE
    for number, place in enumerate(places):
        saved, (back_end, world) = str(tmp_path / str(number)), places[number - 1]
        given = name, (back_end, world), "", saved, at, behind
        first = agreed(worlds.run(world, life, *given))
        assert first == expected[:at], places[number - 1]
        assert agreed(worlds.run(place[1], life, name, place, saved)) == expected[at:], place
