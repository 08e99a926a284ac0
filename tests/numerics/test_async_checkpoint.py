"""Saves in the background: the state of their own step, whatever happens meanwhile."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.inside import persistence_of
from tests.support.saving import (
    ASYNC,
    ENDS_AT,
    SAVED_AT,
    Gated,
    Throttled,
    full_container,
    go_on,
    heard,
    use,
)
from tests.support.training import config, make_engine, train
from tests.support.waiting import wait_for
from tests.support.world import WorldPool
from zero_checkpoint import find, last_save
from zero_checkpoint.errors import CheckpointError

# ---- the state of its own step ----


def save_blocking(root: str, stage: int) -> str:
    engine = make_engine(config(stage))
    train(engine, SAVED_AT)
    assert engine.save_checkpoint(root)
    train(engine, ENDS_AT)
    engine.destroy()
    return engine.weight_hash()


def save_gated(root: str, stage: int) -> str:
    engine = make_engine(config(stage, **ASYNC))
    disk = use(engine, Gated())
    assert isinstance(disk, Gated)
    train(engine, SAVED_AT)
    assert engine.save_checkpoint(root)
    assert disk.reached.wait(120)
    train(engine, ENDS_AT)  # while not a byte is written
    assert find(Path(root)).candidates == ()
    disk.gate.set()
    assert engine.wait_for_checkpoint()
    engine.destroy()
    return engine.weight_hash()


def save_throttled(root: str, stage: int) -> str:
    engine = make_engine(config(stage, **ASYNC))
    disk = use(engine, Throttled())
    assert isinstance(disk, Throttled)
    train(engine, SAVED_AT)
    assert engine.save_checkpoint(root)
    for step in range(SAVED_AT + 1, ENDS_AT + 1):
        before = disk.written
        disk.turns.release()
        wait_for(lambda before=before: disk.written > before, 30, "a part of the file")
        train(engine, step)
    assert find(Path(root)).candidates == ()
    disk.turns.release(1 << 20)
    engine.destroy()
    return engine.weight_hash()


def save_after_a_load(root: str, stage: int) -> str:
    """A load fills the memory that the save before was laid out for."""
    engine = make_engine(config(stage, **ASYNC))
    train(engine, 1)
    engine.save_checkpoint(f"{root}.before")
    train(engine, ENDS_AT)
    engine.load_checkpoint(f"{root}.before")
    train(engine, SAVED_AT)
    engine.save_checkpoint(root)
    train(engine, ENDS_AT)
    engine.destroy()
    return engine.weight_hash()


@pytest.mark.parametrize("save", [save_gated, save_throttled, save_after_a_load])
@pytest.mark.parametrize(("stage", "world"), [(0, 2), (3, 3)])
@pytest.mark.corners(stage=[3], save=[save_gated])
def test_a_background_save_writes_the_bytes_that_a_blocking_one_would_have_written(
    worlds: WorldPool, tmp_path: Path, stage: int, world: int, save: Any
) -> None:
    blocking, background = tmp_path / "blocking", tmp_path / "background"
    end = worlds.run(world, save_blocking, str(blocking), stage)
    assert worlds.run(world, save, str(background), stage) == end
    (ours,), (theirs,) = (find(root).candidates for root in (background, blocking))
    assert ours.manifest.step == theirs.manifest.step == SAVED_AT
    for rank in range(world):
        name = f"r{rank:05d}.safetensors"
        assert (ours.path / name).read_bytes() == (theirs.path / name).read_bytes()
    assert {rank[0] for rank in worlds.run(1, go_on, str(background))} == set(end)


class Diary:
    """A scheduler that goes on with the very list that it gives away as its state."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def step(self) -> None:
        self.steps.append(len(self.steps))

    def state_dict(self) -> dict[str, list[int]]:
        return {"steps": self.steps}


def save_beside_a_scheduler_that_goes_on(root: str) -> list[int]:
    scheduler = Diary()
    engine = make_engine(config(**ASYNC), lr_scheduler=scheduler)
    disk = use(engine, Gated())
    assert isinstance(disk, Gated)
    train(engine, SAVED_AT)
    assert engine.save_checkpoint(root)
    assert disk.reached.wait(120)
    train(engine, ENDS_AT)
    disk.gate.set()
    engine.destroy()
    return scheduler.steps


def test_a_background_save_has_the_scheduler_of_its_own_step(
    worlds: WorldPool, tmp_path: Path
) -> None:
    (steps,) = worlds.run(1, save_beside_a_scheduler_that_goes_on, str(tmp_path))
    (saved,) = find(tmp_path).candidates
    assert len(steps) == ENDS_AT
    assert saved.manifest.meta["engine"]["scheduler"] == {"steps": steps[:SAVED_AT]}


def layout_after_a_load(root: str, moments: bool) -> bool:
    """Whether it is the one before a load, of a checkpoint that has moments or has none."""
    engine = make_engine(config(2, **ASYNC))
    engine.save_checkpoint(f"{root}.fresh")
    train(engine, SAVED_AT)
    engine.save_checkpoint(root)
    saver, state = persistence_of(engine).saver, engine._state
    before = saver.lay_out(state.capture({}, {}))
    engine.load_checkpoint(root if moments else f"{root}.fresh")
    assert saver.has_laid_out(state.capture({}, {})) == moments
    return saver.lay_out(state.capture({}, {})) is before


@pytest.mark.parametrize("moments", [True, False])
def test_the_first_save_after_a_load_into_the_same_memory_is_laid_out_already(
    worlds: WorldPool, tmp_path: Path, moments: bool
) -> None:
    assert worlds.run(2, layout_after_a_load, str(tmp_path / "run"), moments) == [moments] * 2


def test_without_room_in_memory_training_waits_and_says_why_once(
    worlds: WorldPool, tmp_path: Path
) -> None:
    for lines in worlds.run(2, save_twice_without_room, str(tmp_path)):
        (why,) = [line for line in lines if "training waits for checkpoints" in line]
        assert "this machine has 0 MiB of memory left, the state takes 2 MiB" in why
    assert [c.manifest.step for c in find(tmp_path).candidates] == [2, 1]


def save_twice_without_room(root: str) -> list[str]:
    engine = make_engine(config(2, **ASYNC))
    with full_container(Path(root, "cgroup")), heard() as lines:
        for step in (1, 2):
            train(engine, step)
            assert engine.save_checkpoint(root)
            assert len(find(Path(root)).candidates) == step  # it is there at once
    engine.destroy()
    return lines


# ---- one at a time ----


def test_a_save_that_finds_another_in_flight_is_skipped_by_all_ranks_if_so_configured(
    worlds: WorldPool, tmp_path: Path
) -> None:
    assert worlds.run(3, save_while_rank_1_is_busy, str(tmp_path)) == [(False, True)] * 3
    assert [c.manifest.step for c in find(tmp_path).candidates] == [3, 1]


def save_while_rank_1_is_busy(root: str) -> tuple[bool, bool]:
    engine = make_engine(config(1, checkpoint={"async": True, "when_busy": "skip"}))
    disk = use(engine, Gated())
    assert isinstance(disk, Gated)
    if dist.get_rank() != 1:
        disk.gate.set()
    train(engine, 1)
    assert engine.save_checkpoint(root)
    train(engine, 2)
    second = engine.save_checkpoint(root)
    disk.gate.set()
    engine.wait_for_checkpoint()
    train(engine, 3)
    third = engine.save_checkpoint(root)
    engine.destroy()
    return second, third


@pytest.mark.parametrize("trains_on", [False, True])
def test_the_last_save_of_a_script_is_made_at_its_end_if_it_was_skipped(
    worlds: WorldPool, tmp_path: Path, trains_on: bool
) -> None:
    """Behind it, the script has chosen to end without a save."""
    said = "its last checkpoint, of step 2, was skipped" if not trains_on else ""
    assert worlds.run(2, skip_the_last_save, str(tmp_path), trains_on) == [(said, False)] * 2
    steps = [c.manifest.step for c in find(tmp_path).candidates]
    assert steps == ([1] if trains_on else [2, 1])


def skip_the_last_save(root: str, trains_on: bool) -> tuple[str, bool]:
    """What a script that closes nothing would be told; whether anything is owed at the end."""
    engine = make_engine(config(1, checkpoint={"async": True, "when_busy": "skip"}))
    disk, last = use(engine, Gated()), persistence_of(engine).last
    train(engine, 1)
    assert engine.save_checkpoint(root)
    train(engine, 2)
    assert not engine.save_checkpoint(root)
    disk.gate.set()
    if trains_on:
        train(engine, 3)
    said = last.at_exit().partition(" (")[0]
    engine.destroy()
    return said, id(last) in last_save._AT_EXIT


def test_a_save_that_finds_another_in_flight_waits_with_a_word(
    worlds: WorldPool, tmp_path: Path
) -> None:
    first, second = worlds.run(2, save_after_each_step, str(tmp_path))
    assert "waiting: the checkpoint of step 1 is still being written" in first
    assert not [line for line in second if "waiting" in line]
    assert [c.manifest.step for c in find(tmp_path).candidates] == [3, 2, 1]


def save_after_each_step(root: str) -> list[str]:
    engine = make_engine(config(1, **ASYNC))
    disk = use(engine, Gated())
    assert isinstance(disk, Gated)
    with heard() as lines:
        train(engine, 1)
        engine.save_checkpoint(root)
        train(engine, 2)
        opener = threading.Thread(target=open_when_waited_for, args=(disk, lines))
        opener.start()
        engine.save_checkpoint(root)
        opener.join()
        train(engine, 3)
        engine.save_checkpoint(root)
        engine.destroy()
    return lines


def open_when_waited_for(disk: Gated, lines: list[str]) -> None:
    """On rank 0, which says so; until then it keeps the others waiting, too."""
    if dist.get_rank() == 0:
        wait_for(lambda: any("waiting" in line for line in lines), 30, "a second save")
    disk.gate.set()


# ---- what stays ----


def test_the_best_checkpoint_stays_by_the_number_that_the_script_saves(
    worlds: WorldPool, tmp_path: Path
) -> None:
    for says in worlds.run(2, save_with_losses, str(tmp_path)):
        assert "client_state['eval_loss'] is 'low'; checkpoint.keep_best compares numbers" in says
    assert [c.manifest.step for c in find(tmp_path).candidates] == [5, 4, 2]


def save_with_losses(root: str) -> str:
    best = {"metric": "eval_loss", "n": 1}
    engine = make_engine(config(1, checkpoint={"keep_last": 2, "keep_best": best}))
    for step, loss in enumerate([3.0, 1.0, 2.0, float("nan"), None], start=1):
        train(engine, step)
        engine.save_checkpoint(root, client_state={"eval_loss": loss} if loss else {})
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(root, client_state={"eval_loss": "low"})
    engine.destroy()
    return str(caught.value)


# ---- when ----


@pytest.mark.parametrize(("ahead", "answer"), [(0, True), (1, False)])
def test_all_ranks_go_by_the_clock_of_rank_0(worlds: WorldPool, ahead: int, answer: bool) -> None:
    assert worlds.run(2, ask_with_one_clock_ahead, ahead) == [answer] * 2


def ask_with_one_clock_ahead(ahead: int) -> bool:
    engine = make_engine(config(1, checkpoint={"every_s": 500}))
    if dist.get_rank() == ahead:
        persistence_of(engine).schedule._clock = lambda: time.monotonic() + 1000
    train(engine, 1)
    due = engine.checkpoint_due()
    engine.destroy()
    return due


# ---- the weight hash ----


@pytest.mark.parametrize(
    ("configured", "blocking", "there"),
    [(None, True, True), (None, False, False), (True, False, True), (False, True, False)],
)
def test_the_weight_hash_is_taken_where_training_waits_anyway_or_as_configured(
    worlds: WorldPool, tmp_path: Path, configured: bool | None, blocking: bool, there: bool
) -> None:
    (digest, moved), _ = worlds.run(2, save_hashed, str(tmp_path), configured, blocking)
    engine = find(tmp_path).candidates[0].manifest.meta["engine"]
    assert engine["weight_hash"] == (digest if there else None)
    assert (moved > OPTIONS_BYTES) == there


OPTIONS_BYTES = 8
"""Sent by each save: the checksum of what the ranks give it."""


def save_hashed(root: str, configured: bool | None, blocking: bool) -> tuple[str, int]:
    """The hash, and how many bytes a save has moved between ranks."""
    engine = make_engine(config(3, checkpoint={"weight_hash": configured}))
    train(engine, 1)
    counter = engine._core.collectives.bytes_sent
    before = counter.total()
    engine.save_checkpoint(root, blocking=blocking)
    engine.wait_for_checkpoint()
    moved = counter.total() - before
    digest = engine.weight_hash()
    engine.destroy()
    return digest, moved
