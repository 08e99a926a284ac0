"""Saves beside training, on full and damaged disks, in memory; and steps that are broken off."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.numerics.in_memory.nodes import checkpoints, drop, on_a_node, settle
from tests.numerics.promises.back_ends import (
    BACK_ENDS,
    STEPS,
    WITH_EVERYTHING,
    Net,
    Recipe,
    agreed,
    hashes,
    training,
)
from tests.support.inside import persistence_of
from tests.support.saving import Full, Gated, heard, use
from tests.support.waiting import wait_for
from tests.support.world import WorldPool
from tests.unit.checkpoint.support import flip
from zero_checkpoint import find
from zero_checkpoint.errors import ModelMismatch
from zero_checkpoint.format.pieces import PARAM
from zero_checkpoint.loading.candidates import Candidate
from zero_contract.errors import ZeroError

ENDS_AT = 5
OTHER = {"ddp": "stage3", "fsdp2": "stage0", "stage0": "hsdp", "stage3": "ddp"}
"""Who goes on from whose checkpoint; the others' is plain."""


def save_in_every_way(root: str, back_end: str) -> tuple[list[str], list[str]]:
    """A blocking save of step 1, one of step 2 on a full disk, one of step 3 beside steps 4 and 5.

    Returns:
        The hashes, and what was said of the full disk.
    """
    recipe = replace(WITH_EVERYTHING, sections={"checkpoint": {"async": True}})
    own = training(recipe, back_end)
    found = list(own.hashes(1))
    assert own.save(root)
    own.session.wait()
    use(own.session, Full(dist.get_world_size() - 1))
    found += own.hashes(2)
    with heard(logging.WARNING) as lines:
        own.save(root)
        wait_for(lambda: not persistence_of(own.session).saver.busy, 60, "the end of the save")
        found += own.hashes(3)
    disk = use(own.session, Gated())
    assert own.save(root)
    assert disk.reached.wait(120)
    found += own.hashes(ENDS_AT)
    assert len(find(Path(root)).candidates) == 1  # not a byte is written
    disk.gate.set()
    own.close()
    return found, [line for line in lines if "was not saved" in line]


def load_and_end(root: str, back_end: str, saves: bool) -> tuple[int, str]:
    own = training(WITH_EVERYTHING, back_end, weights=8)
    own.load(root)
    begun = own.step
    own.train(ENDS_AT)
    if saves:
        own.save(root)
    own.close()
    return begun, own.hash()


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.corners(back_end=["stage3"])
def test_a_save_is_of_its_step_and_of_a_damaged_one_all_ranks_go_back_to_the_one_before(
    worlds: WorldPool, tmp_path: Path, back_end: str
) -> None:
    """Neither a full disk nor a save in the background changes the training."""
    (expected,) = worlds.run(1, hashes, WITH_EVERYTHING, "plain", ENDS_AT)
    world, other = BACK_ENDS[back_end], OTHER.get(back_end, "plain")
    (first, (warning,)), *others = worlds.run(world, save_in_every_way, str(tmp_path), back_end)
    assert [first, *(found for found, _ in others)] == [expected] * world
    assert [lines for _, lines in others] == [[]] * (world - 1)
    assert warning.startswith("the checkpoint of step 2 was not saved; training continues")
    assert warning.endswith("No space left on device (errno 28)")

    newest, before = find(tmp_path).candidates
    assert (newest.manifest.step, before.manifest.step) == (3, 1)
    goes_on = BACK_ENDS[other]
    whole = worlds.run(goes_on, load_and_end, str(tmp_path), other, False)
    assert whole == [(3, expected[-1])] * goes_on
    damage(newest)
    older = worlds.run(goes_on, load_and_end, str(tmp_path), other, True)
    assert older == [(1, expected[-1])] * goes_on
    assert (newest.path / "QUARANTINE").exists()


def damage(checkpoint: Candidate) -> None:
    """Flip a byte of weights that the last rank that has some has written."""
    rows, ids = checkpoint.manifest.fragments, list(checkpoint.manifest.tensors)
    of_weights = [n for n, tensor in enumerate(rows.tensor) if ids[tensor].kind == PARAM]
    row = max(of_weights, key=lambda n: int(rows.file[n]))
    name = checkpoint.manifest.files[rows.file[row]].name
    flip(checkpoint.path / name, int(rows.offset[row]))


# ---- in memory ----


class Wider(Net):
    """Another model: one parameter more."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def refused_in_between(back_end: str, other: str) -> list[str]:
    """The hashes of a run that tries to load a checkpoint of another model after two steps."""
    save_once(Recipe(model=Wider), back_end, other)
    own = training(Recipe(), back_end)
    found = list(own.hashes(2))
    with pytest.raises(ModelMismatch, match="param/scale"):
        own.load(other)
    return [*found, *own.hashes(STEPS)]


def save_once(recipe: Recipe, back_end: str, directory: str) -> None:
    own = training(recipe, back_end)
    own.train(1)
    own.save(directory)
    own.close()


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.corners(back_end=["fsdp2"])
def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(
    worlds: WorldPool, tmp_path: Path, back_end: str
) -> None:
    world = BACK_ENDS[back_end]
    found = agreed(worlds.run(world, refused_in_between, back_end, str(tmp_path)))
    assert found == agreed(worlds.run(world, hashes, Recipe(), back_end, STEPS))


def kept_in_memory(
    root: str, recipe: Recipe, back_end: str, until: int, weights: int
) -> tuple[int, list[str]]:
    """Go on from the newest checkpoint of the nodes' memories; end as a crash does."""
    recipe = replace(recipe, sections={**recipe.sections, "checkpoint": {"ram": {}}})
    with on_a_node(root):
        own = training(recipe, back_end, weights)
        own.load(str(checkpoints(root)))
        begun, found = own.step, []
        for step in range(begun + 1, until + 1):
            found += own.hashes(step)
            own.session.due(every_steps=1000)  # the script comes back from behind its step
            settle(own.session)
        drop(own.session)
        return begun, found


def test_a_run_goes_on_from_the_memory_of_its_nodes_in_another_back_end(
    worlds: WorldPool, tmp_path: Path
) -> None:
    root, found = str(tmp_path), list[str]()
    for number, (back_end, world) in enumerate([("ddp", 3), ("stage3", 2), ("fsdp2", 2)]):
        until = 2 * number + 2
        (part, *others) = worlds.run(
            world, kept_in_memory, root, WITH_EVERYTHING, back_end, until, number
        )
        assert part[0] == 2 * number
        assert others == [part] * (world - 1)
        found += part[1]
    assert not list(checkpoints(root).glob("step-*"))
    assert found == worlds.run(1, hashes, WITH_EVERYTHING, "plain", 6)[0]


# ---- a step that is broken off between its first change and its last ----


class Schedule(torch.optim.lr_scheduler.LambdaLR):
    """A script's own, which may be interrupted."""

    breaks = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, lambda step: 0.5**step)

    def step(self, *args: Any) -> None:
        if self.breaks:
            interrupt()
        super().step(*args)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt("Ctrl-C")


SCHEDULED = replace(WITH_EVERYTHING, scheduler=Schedule)


def break_a_step(root: str, back_end: str, where: str) -> tuple[str, str]:
    """Ctrl-C inside of the step: what a save is told, and the end of who loads."""
    own = training(SCHEDULED, back_end)
    own.train(2)
    own.save(root)
    hook = own.optimizer.register_step_post_hook(interrupt)
    writes: Any = own.session.writes
    if where == "buffers":
        hook.remove()
        writes.end_step = interrupt
    if where == "schedule":
        hook.remove()
        own.scheduler.breaks = True
    with pytest.raises(KeyboardInterrupt):
        own.train(3)
    hook.remove()
    vars(writes).pop("end_step", None)
    own.scheduler.breaks = False
    with pytest.raises(ZeroError) as refused:
        own.save(root)
    own.load(root)
    if back_end == "offload" and where == "optimizer":  # a load does not mend its tiers
        with pytest.raises(ZeroError, match="start again from the newest checkpoint"):
            own.train(3)
        own = training(SCHEDULED, back_end, weights=8)
        own.load(root)
    own.train(ENDS_AT)
    own.close()
    return str(refused.value), own.hash()


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("where", ["optimizer", "schedule", "buffers"])
@pytest.mark.corners(back_end=["fsdp2", "stage3"], where=["optimizer"])
def test_nothing_is_made_of_half_a_step_and_the_newest_checkpoint_goes_on(
    worlds: WorldPool, tmp_path: Path, back_end: str, where: str
) -> None:
    (expected,) = worlds.run(1, hashes, SCHEDULED, "plain", ENDS_AT)
    by_engine = back_end.startswith(("stage", "offload"))
    why = "a step has failed half way: Ctrl-C; load" if by_engine else "save() in the middle of a"
    for told, end in worlds.run(BACK_ENDS[back_end], break_a_step, str(tmp_path), back_end, where):
        assert why in told
        assert end == expected[-1]
