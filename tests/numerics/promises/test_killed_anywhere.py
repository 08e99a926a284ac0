"""A rank is killed at any moment of a drawn script: nothing is lost, doubled or changed.

Whoever goes on, under another back end and at another world size, ends with the weights and the
samples of the same script in one process that nothing has happened to.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.numerics.promises.back_ends import (
    EVERYWHERE,
    SAMPLES,
    STEPS,
    WITH_EVERYTHING,
    Place,
    Recipe,
    Training,
    hashes,
    training,
)
from tests.numerics.promises.test_combinations import SCRIPTS, recipe_of
from tests.support.deadly import DEADLY
from tests.support.world import WorldError, WorldPool
from zero_data import read_ledger, verify

MOMENTS = ["a draw", "a forward", "a backward", "a step", "the optimizer", "an end", "a change"]
"""Where a rank dies: behind a draw, within a forward and a backward, before the calls that end a
micro-step, behind those of the optimizer, behind a step, at a change of a file."""


@dataclass(frozen=True)
class Kill:
    place: Place
    rank: int
    moment: str
    number: int
    """How often this rank has come to the moment."""


class Life:
    """One start of a script, of which a rank may die."""

    def __init__(self, recipe: Recipe, root: str, kill: Kill) -> None:
        sections: dict[str, Any] = {**recipe.sections}
        sections["elastic"] = {**sections.get("elastic", {}), "sample_ledger": f"{root}/ledger"}
        sections["checkpoint"] = {"keep_last": 2}
        self._came = Counter[str]()
        self._kill = kill if kill.rank % kill.place[1] == dist.get_rank() else None
        number = kill.number if self._kill and kill.moment == "a change" else 0
        DEADLY.arm([root], number)
        self.own = training(replace(recipe, sections=sections), kill.place[0])
        self._watch(self.own)

    def _watch(self, own: Training) -> None:
        last = [*own.module.children()][-1]
        last.register_forward_hook(self._see_forward)
        if self._kill and self._kill.moment == "the optimizer":
            own.optimizer.register_step_post_hook(lambda *_: self.reach("the optimizer"))

    def _see_forward(self, _: nn.Module, __: Any, output: Any) -> None:
        self.reach("a forward")
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda _: self.reach("a backward"))

    def reach(self, moment: str) -> None:
        self._came[moment] += 1
        kill = self._kill
        if kill and (moment, self._came[moment]) == (kill.moment, kill.number):
            os.kill(os.getpid(), signal.SIGKILL)

    def live(self, directory: str) -> str:
        own, recipe = self.own, self.own.recipe
        own.load(directory)
        while (at := own.step) < STEPS:
            own.prepare(at)
            for (batch,) in own.loader:
                self.reach("a draw")
                own.backward(batch)
                if recipe.between is not None:
                    recipe.between(own.called, own.optimizer)
                self.reach("a step")
                own.end()
                if own.step > at:
                    break
            self.reach("an end")
            own.save(directory)
        own.close()
        return own.hash()


def life(recipe: Recipe, root: str, kill: Kill) -> str:
    with recipe.within():
        try:
            return Life(recipe, root, kill).live(f"{root}/checkpoints")
        finally:
            DEADLY.arm([])


def killed(worlds: WorldPool, root: Path, recipe: Recipe, kills: list[Kill]) -> None:
    (expected,) = worlds.run(1, hashes, recipe, "plain", STEPS)
    for kill in kills:
        told = f"rank {kill.rank % kill.place[1]} died, exit -9"
        try:
            worlds.run(kill.place[1], life, recipe, str(root), kill, grace_s=0.5)
        except WorldError as error:
            if told not in str(error):
                raise
    last = Kill(("stage2", 3) if len(kills) % 2 else ("plain", 1), 0, "", 0)
    ends = worlds.run(last.place[1], life, recipe, str(root), last)
    assert set(ends) == {expected[-1]}
    report = verify(read_ledger(root / "ledger"), SAMPLES)
    assert (report.problems, report.steps) == ((), STEPS)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("place", [("ddp", 2), ("fsdp2", 2), ("stage3", 2)], ids=str)
@pytest.mark.corners(moment=["a backward"], place=[("ddp", 2)])
def test_whoever_goes_on_ends_as_if_nothing_had_happened(
    worlds: WorldPool, tmp_path: Path, place: Place, moment: str
) -> None:
    kills = [Kill(place, 1, moment, 4), Kill(place, 0, moment, 1)]
    killed(worlds, tmp_path, WITH_EVERYTHING, kills)


KILLS = st.lists(
    st.builds(
        Kill,
        st.sampled_from(EVERYWHERE),
        st.integers(0, 3),
        st.sampled_from(MOMENTS),
        st.integers(1, 12),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=20, phases=[Phase.generate])
@given(script=SCRIPTS, kills=KILLS)
@pytest.mark.full
def test_any_script_ends_as_if_nothing_had_happened(
    worlds: WorldPool,
    tmp_path_factory: pytest.TempPathFactory,
    script: dict[str, Any],
    kills: list[Kill],
) -> None:
    recipe = replace(recipe_of(script), nodes="")
    killed(worlds, tmp_path_factory.mktemp("killed"), recipe, kills)
