"""Checkpoints in memory, made by engines: of which run the one is that is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zero_torch
from tests.numerics.in_memory.nodes import (
    checkpoints,
    drop,
    finish,
    in_memory,
    on_a_node,
    run_alone,
    settle,
)
from tests.support.saving import heard
from tests.support.training import make_engine, train
from tests.support.world import WorldPool


def load_other(root: str, how: str) -> tuple[int, int]:
    """The step that a load in part, or by a tag, finds; then the one that a whole load finds."""
    with on_a_node(root):
        engine = make_engine(in_memory(1))
        more: dict[str, Any] = {
            "tag": {"tag": "global_step2"},
            "module": {"load_module_only": True},
        }[how]
        path, _ = engine.load_checkpoint(checkpoints(root), **more)
        first = int(Path(str(path)).name[5:14])
        engine.load_checkpoint(checkpoints(root))
        whole = engine.global_steps
        drop(engine)
        return first, whole


@pytest.mark.parametrize(("how", "then"), [("module", 4), ("tag", 2)])
@pytest.mark.corners(how=["tag"])
def test_weights_alone_or_a_tag_come_from_disk_and_a_tag_begins_a_new_line(
    worlds: WorldPool, root: str, how: str, then: int
) -> None:
    worlds.run(2, save_at_2_keep_4, root)
    assert worlds.run(2, load_other, root, how) == [(2, then)] * 2


def save_at_2_keep_4(root: str) -> None:
    with on_a_node(root):
        engine = make_engine(in_memory(1))
        train(engine, 2)
        engine.save_checkpoint(checkpoints(root))
        for step in (3, 4):
            train(engine, step)
            settle(engine)
        drop(engine)


def test_two_engines_that_resume_from_one_directory_have_each_its_own_checkpoints_in_memory(
    worlds: WorldPool, root: str
) -> None:
    """An actor and a critic, say, which begin with one checkpoint: either was loaded for both."""
    worlds.run(2, save_at_2_keep_4, root)
    kept = worlds.run(2, train_two_from_one_directory, root, True)
    assert kept == worlds.run(2, train_two_from_one_directory, root, False)
    assert [(step, len(set(hashes))) for step, hashes in kept] == [(6, 2)] * 2


def train_two_from_one_directory(root: str, trains: bool) -> tuple[int, list[str]]:
    """The last step, and the weights of each: one learns faster than the other."""
    with on_a_node(root):
        engines = [make_engine(in_memory(1)) for _ in range(2)]
        for engine in engines:
            engine.load_checkpoint(checkpoints(root))
        for step in (5, 6) if trains else ():
            for rate, engine in zip((0.01, 0.02), engines, strict=True):
                engine.set_lr(rate)
                train(engine, step)
                settle(engine)
        steps = {engine.global_steps for engine in engines}
        hashes = [engine.weight_hash() for engine in engines]
        for engine in engines:
            drop(engine)
        return max(steps), hashes


def test_who_has_gone_back_to_a_tag_goes_on_from_the_newest_step_after_it(
    worlds: WorldPool, root: str
) -> None:
    """Its steps count as newer than those on disk that it has left, and among themselves too."""
    worlds.run(2, save_at_2_and_4, root)
    worlds.run(2, go_back_to_2_keep_3_and_4, root)
    assert worlds.run(2, finish, root, 1) == [(4, *worlds.run(1, run_alone))] * 2


def save_at_2_and_4(root: str) -> None:
    with on_a_node(root):
        engine = make_engine(in_memory(1))
        for step in (2, 4):
            train(engine, step)
            engine.save_checkpoint(checkpoints(root))
        settle(engine)
        drop(engine)


def go_back_to_2_keep_3_and_4(root: str) -> None:
    with on_a_node(root):
        engine = make_engine(in_memory(1))
        engine.load_checkpoint(checkpoints(root), tag="global_step2")
        for step in (3, 4):
            train(engine, step)
            settle(engine)
        drop(engine)


def test_the_best_so_far_is_another_directory_and_is_loaded_from_disk(
    worlds: WorldPool, root: str
) -> None:
    """Who has trained and loads again goes back to it; then a failure goes on from there."""
    assert worlds.run(2, go_back_to_the_best, root) == [(2, 3)] * 2
    assert worlds.run(2, finish, root, 1) == [(3, *worlds.run(1, run_alone))] * 2


def go_back_to_the_best(root: str) -> tuple[int, int]:
    best = f"{root}/best"
    with on_a_node(root):
        engine = make_engine(in_memory(1))
        engine.load_checkpoint(checkpoints(root))
        train(engine, 2)
        engine.save_checkpoint(best)
        for step in (3, 4, 5):
            train(engine, step)
            settle(engine)
        engine.load_checkpoint(best)
        went_back_to = engine.global_steps
        train(engine, 3)
        settle(engine)
        drop(engine)
        return went_back_to, engine.global_steps


def test_a_script_with_state_of_its_own_says_where_it_is_or_gets_none(
    worlds: WorldPool, root: str
) -> None:
    lines, _ = worlds.run(2, train_with_state, root, False)
    assert [line for line in lines if "register it with keep_client_state()" in line]
    assert worlds.run(2, loaded_state, root) == [(2, {"best": 2})] * 2
    worlds.run(2, train_with_state, root, True)
    assert worlds.run(2, loaded_state, root) == [(4, {"best": 4})] * 2


def test_what_was_kept_before_a_script_told_of_its_state_is_not_gone_back_to(
    worlds: WorldPool, root: str
) -> None:
    """Of one step there is one in memory, without it, and one on disk, with it."""
    worlds.run(2, keep_and_save_step_2, root)
    assert worlds.run(2, loaded_state, root) == [(2, {"best": 2})] * 2


def keep_and_save_step_2(root: str) -> None:
    with on_a_node(root):
        engine = make_engine(in_memory(1))
        engine.load_checkpoint(checkpoints(root))
        train(engine, 2)
        settle(engine)
        engine.save_checkpoint(checkpoints(root), client_state={"best": 2})
        drop(engine)


def train_with_state(root: str, tells: bool) -> list[str]:
    with on_a_node(root), heard() as lines:
        engine = make_engine(in_memory(1))
        if tells:
            engine.keep_client_state(lambda: {"best": engine.global_steps})
        train(engine, 2)
        engine.save_checkpoint(checkpoints(root), client_state={"best": 2})
        for step in (3, 4):
            train(engine, step)
            settle(engine)
        drop(engine)
    return lines


def loaded_state(root: str) -> tuple[int, dict[str, Any]]:
    with on_a_node(root):
        engine = make_engine(in_memory(1))
        _, client = engine.load_checkpoint(checkpoints(root))
        drop(engine)
        client.pop("ds_version", None)
        return engine.global_steps, client


class Position:
    """Of a loader of the script's own, which counts the batches that it has handed out."""

    def __init__(self) -> None:
        self.drawn = 0

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]


@pytest.mark.parametrize("asks", [True, False])
def test_a_position_that_the_script_counts_is_that_of_the_step_that_is_in_memory(
    worlds: WorldPool, root: str, asks: bool
) -> None:
    """A script that asks for no save has drawn its next batch where the run comes to know of it."""
    assert worlds.run(1, train_with_position, root, asks) == [(0, 0)]
    kept = 3 if asks else 0
    assert worlds.run(1, train_with_position, root, asks) == [(kept, kept)]


def train_with_position(root: str, asks: bool) -> tuple[int, int]:
    """Where a loop of the script's own went on; the steps that were done, and the batches drawn."""
    position, model = Position(), torch.nn.Linear(2, 1)
    with on_a_node(root):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given: dict[str, Any] = {"stateful": {"position": position}}
        run = zero_torch.protect(model, optimizer, config={"checkpoint": {"ram": {}}}, **given)
        run.load(checkpoints(root))
        resumed = run.global_step, position.drawn
        for _ in range(3):
            position.drawn += 1
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            if asks:
                run.due(every_steps=100)
                settle(run, comes_back=False)
        drop(run)
    return resumed
