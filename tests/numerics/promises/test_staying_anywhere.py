"""The ranks of a drawn script change while its processes stay: nothing is lost, doubled or changed.

A rank joins, leaves or is killed at any moment of a step. Whoever is there at the end, from the
begin or since a change, has the weights and the samples of the same script in one process that
nothing has happened to.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.numerics.promises.back_ends import IN, SAMPLES, Recipe, training
from tests.numerics.promises.test_combinations import SCRIPTS, recipe_of
from tests.numerics.promises.test_schedulers import MADE, worse
from tests.support.inside import await_memory
from tests.support.staying import Job
from tests.support.world import WorldPool
from zero_contract.worker import ENV_ROUND

UNTIL = 9
"""Steps, in three epochs."""
BEHIND = "an end"
MOMENTS = ["a draw", "a forward", "a backward", "a step", BEHIND]
KINDS = ["ddp", "stage0", "stage1", "stage2", "stage3", "offload"]


def follow(_: nn.Module, optimizer: Any) -> None:
    """What a script does behind each step."""
    for group in optimizer.param_groups:
        group["lr"] = 0.9 * group["lr"]


class Life:
    """A process of a script, which dies in its first round, or goes on in others."""

    until = UNTIL

    def __init__(
        self, recipe: Recipe, kind: str, victim: int = -1, moment: str = "", step: int = 0
    ) -> None:
        sections = {"checkpoint": {"ram": {}}, **recipe.sections}
        sections["elastic"] = {"in_place": True, **sections.get("elastic", {})}
        self.own = training(replace(recipe, sections=sections), kind)
        self.cursor: Any = self.own.session._training.cursor
        self._dies = os.environ.get(ENV_ROUND) == "1" and dist.get_rank() == victim
        self._at = moment, step - 1 + (moment == BEHIND)
        [*self.own.module.children()][-1].register_forward_hook(self._see_forward)

    def _see_forward(self, _: nn.Module, __: Any, output: Any) -> None:
        self.reach("a forward")
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda _: self.reach("a backward"))

    def reach(self, moment: str) -> None:
        if self._dies and (moment, self.own.step) == self._at:
            os.kill(os.getpid(), signal.SIGKILL)

    def train_epoch(self) -> None:
        """To its end, or to that of the run."""
        own = self.own
        for (batch,) in own.loader:
            if self.cursor.micro == 0:
                own.prepare(own.step)
            await_memory(getattr(own, "engine", own.session))
            self.reach("a draw")
            own.backward(batch)
            self.reach("a step")
            before = own.step
            own.end()
            if own.step > before:
                self.behind(before)
            self.reach(BEHIND)
            if own.step == self.until:
                break
        else:
            self.behind_epoch()

    def behind_epoch(self) -> None:
        """What the script does behind a loop over an epoch."""
        follow(self.own.module, self.own.optimizer)

    def behind(self, step: int) -> None:
        """What the script does behind a step, which had this number."""
        follow(self.own.module, self.own.optimizer)
        if self.own.recipe.metric is not None:
            self.own.scheduler.step(self.own.recipe.metric(step))

    def live(self, directory: str) -> tuple[str, int]:
        own = self.own
        own.load(directory)
        while own.step < self.until:
            self.train_epoch()
        result = own.hash(), self.cursor.samples
        own.close()
        return result


def lived(directory: str, recipe: Recipe, *given: Any) -> tuple[str, int]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    with recipe.within():
        return Life(recipe, *given).live(directory)


def alone(recipe: Recipe, directory: str) -> tuple[str, int]:
    return lived(directory, recipe, "plain")


Change = tuple[str, int, str, int]
"""What happens ("joins", "leaves" or "dies"), to which rank, at which moment of which step."""


def changed(
    make: Callable[..., Job], root: Path, recipe: Recipe, kind: str, change: Change
) -> list[tuple[str, int]]:
    """What each process of the last round ends with; who stays has a process of the first one."""
    what, rank, moment, step = change
    victim = rank if what == "dies" else -1
    one = make(lived, str(root / "checkpoints"), recipe, kind, victim, moment, step)
    one.memory = root / "memory"
    one.memory.mkdir()
    one.begin([], joining=3)
    first = {process.pid for process in one.members}
    others = [each for each in range(3) if each != rank]
    stay = [0, 1, 2] if what == "joins" else others
    if what == "dies":
        one.run_on()
        stay, expected = one.parted() or [], stay if is_in_epoch(recipe, step) else []
        # Behind a step that has ended for the victim it may not have for others.
        assert stay == expected or (moment == BEHIND and {*stay} <= {*others})
    else:
        one.leave_at(step)
    one.begin(stay, joining=3 + (what == "joins") - (what == "leaves") - len(stay))
    ended = dict(one.to_end())
    assert len(first & ended.keys()) in ({0, len(stay)} if what == "dies" else {len(stay)})
    return [*ended.values()]


def is_in_epoch(recipe: Recipe, step: int) -> bool:
    """Whether a step is not the first of an epoch.

    Before that has ended, nothing in memory has what the script has done behind the epoch before.
    """
    return (step - 1) % -(-SAMPLES // (2 * recipe.microbatches)) != 0


class Follows(nn.Module):
    """Its loss depends on a mean of what it has seen, in a buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.head = nn.Linear(IN, IN), nn.Linear(IN, 1)
        self.register_buffer("mean", torch.zeros(IN), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.down(x))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean(0))
        return (self.head(y + self.mean) - 1.0).square().mean()


@pytest.mark.parametrize("kind", ["ddp", "stage2"])
@pytest.mark.corners(kind=["stage2"])
def test_a_step_that_loses_a_peer_has_no_effect_on_buffers_that_no_checkpoint_has(
    job: Callable[..., Job], worlds: WorldPool, tmp_path: Path, kind: str
) -> None:
    recipe = Recipe(model=Follows, of_wrapper=())
    ends_alike(job, worlds, tmp_path, recipe, kind, ("dies", 1, "a backward", 5))


def begun_again(recipe: Recipe, directory: str, step: int) -> tuple[str, int]:
    """One rank, whose script is started again behind a step."""
    life = Life(recipe, "plain")
    life.until = step
    while life.own.step < step:
        life.train_epoch()
    life.own.save(directory)
    life.own.close()
    return lived(directory, recipe, "plain")


@pytest.mark.parametrize("kind", ["ddp", "stage2"])
@pytest.mark.corners(kind=["ddp"])
def test_who_would_go_back_further_than_the_lost_step_is_started_anew_with_such_buffers(
    job: Callable[..., Job], worlds: WorldPool, tmp_path: Path, kind: str
) -> None:
    kept = {"checkpoint": {"ram": {"every_steps": 4}}}
    recipe = Recipe(model=Follows, of_wrapper=(), sections=kept)
    one = job(lived, str(tmp_path / "checkpoints"), recipe, kind, 1, "a backward", 6)
    one.memory = tmp_path / "memory"
    one.memory.mkdir()
    one.begin([], joining=3)
    one.run_on()
    assert one.parted() == []
    one.begin([], joining=3)
    found = [result for _, result in one.to_end()]
    expected = worlds.run(1, begun_again, recipe, str(tmp_path / "alone"), 4)
    assert set(found) == {*expected}


CHANGES = st.tuples(
    st.sampled_from(["joins", "leaves", "dies"]),
    st.integers(0, 2),
    st.sampled_from(MOMENTS),
    st.integers(3, 6),
)
"""Of a step whose one before is in memory."""


def staying(script: dict[str, Any]) -> Recipe:
    """A script whose processes can stay: no evaluation exchanges anything in a step."""
    recipe = recipe_of({**script, "workers": 0, "nodes": "", "evaluation": ""})
    if script["model"] == "seldom":
        return recipe
    return replace(recipe, of_wrapper=())


def ends_alike(
    make: Callable[..., Job], worlds: WorldPool, root: Path, recipe: Recipe, *given: Any
) -> None:
    found = changed(make, root, recipe, *given)
    assert set(found) == {*worlds.run(1, alone, recipe, str(root / "alone"))}


@pytest.mark.parametrize("change", [("joins", 0, "", 4), ("dies", 1, "a backward", 4)], ids=str)
@pytest.mark.parametrize("name", sorted(MADE.keys() - {"OneCycleLR"}))  # it ends after 6 steps
@pytest.mark.corners(name=["ReduceLROnPlateau"], change=[("joins", 0, "", 4)])
def test_a_run_that_stays_steps_its_scheduler_as_before(
    job: Callable[..., Job], worlds: WorldPool, tmp_path: Path, name: str, change: Change
) -> None:
    metric = worse if name == "ReduceLROnPlateau" else None
    recipe = Recipe(scheduler=MADE[name], metric=metric, of_wrapper=())
    ends_alike(job, worlds, tmp_path, recipe, "ddp", change)


@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize("moment", ["a draw", BEHIND])
@pytest.mark.parametrize("step", [6, 7, 8])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.corners(kind=["ddp"], own_loop=[True], moment=["a draw"], step=[6, 7])
def test_who_loses_a_peer_where_epochs_end_does_what_is_behind_an_epoch_once(
    job: Callable[..., Job],
    worlds: WorldPool,
    tmp_path: Path,
    kind: str,
    step: int,
    moment: str,
    own_loop: bool,
) -> None:
    recipe = Recipe(own_loop=own_loop, of_wrapper=())
    ends_alike(job, worlds, tmp_path, recipe, kind, ("dies", 2, moment, step))


@settings(max_examples=20, phases=[Phase.generate])
@given(script=SCRIPTS, kind=st.sampled_from(KINDS), change=CHANGES)
@pytest.mark.full
def test_processes_of_any_script_that_stay_end_as_if_nothing_had_happened(
    worlds: WorldPool,
    tmp_path_factory: pytest.TempPathFactory,
    script: dict[str, Any],
    kind: str,
    change: Change,
) -> None:
    # DDP exchanges by itself what is not used.
    assume(script["model"] != "seldom" or (kind, change[0]) != ("ddp", "dies"))
    root = tmp_path_factory.mktemp("staying")
    with contextlib.ExitStack() as stack:

        def make(*given: Any) -> Job:
            return stack.enter_context(contextlib.closing(Job(root, *given)))

        ends_alike(make, worlds, root, staying(script), kind, change)
