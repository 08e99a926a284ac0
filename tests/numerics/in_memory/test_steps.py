"""Checkpoints in memory, made by engines: which steps are kept, and gone on from."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.numerics.in_memory.nodes import (
    STEPS,
    checkpoints,
    drop,
    finish,
    in_memory,
    on_a_node,
    run_alone,
    settle,
)
from tests.numerics.test_offload import offloading
from tests.support.inside import persistence_of
from tests.support.models import Tokens
from tests.support.saving import heard
from tests.support.training import make_engine, train
from tests.support.waiting import wait_for
from tests.support.world import WorldPool
from zero_checkpoint import find
from zero_contract.worker import CommitRequest, Saved
from zero_engine.core.engine import Engine


def keep_steps(root: str, stage: int, last: int, ram: dict[str, Any]) -> tuple[list[int], int]:
    """Train from what there is; the steps that were committed, and the one that was loaded."""
    with on_a_node(root) as agent:
        engine = make_engine(in_memory(stage, **ram))
        engine.load_checkpoint(checkpoints(root))
        loaded = engine.global_steps
        for step in range(loaded + 1, last + 1):
            train(engine, step)
            settle(engine)
        drop(engine)
        return [
            m.step for m in agent.told() if isinstance(m, CommitRequest) and m.in_memory
        ], loaded


@pytest.mark.parametrize(
    ("stage", "world", "other_stage", "other_world"), [(0, 2, 3, 1), (3, 3, 1, 2)]
)
def test_a_run_goes_on_from_memory_at_another_world_size_and_stage(
    worlds: WorldPool, root: str, stage: int, world: int, other_stage: int, other_world: int
) -> None:
    undisturbed = worlds.run(1, run_alone)
    kept, *_ = worlds.run(world, keep_steps, root, stage, 3, {})
    assert kept == ([1, 2, 3], 0)
    assert find(checkpoints(root)).candidates == ()
    assert worlds.run(other_world, finish, root, other_stage) == [(3, *undisturbed)] * other_world


@pytest.mark.parametrize(
    ("stage", "where"), [(1, "cpu"), (2, "nvme"), (3, "nvme+cpu"), (3, "nvme+nvme")]
)
@pytest.mark.corners(stage=[3], where=["nvme+cpu"])
def test_state_that_rests_on_a_disk_is_kept_in_memory_and_comes_back_to_it(
    worlds: WorldPool, root: str, stage: int, where: str
) -> None:
    undisturbed = worlds.run(1, run_alone)
    assert worlds.run(2, keep_offloaded, root, stage, where, 3)[0] == (0, [1, 2, 3], "")
    assert find(checkpoints(root)).candidates == ()
    ends = worlds.run(3, keep_offloaded, root, stage, where, STEPS)
    assert ends == [(3, kept, *undisturbed) for kept in ([4, 5], [], [])]


def keep_offloaded(root: str, stage: int, where: str, last: int) -> tuple[int, list[int], str]:
    """Go on to a step; where from, what was committed, and the weights, if it is the last."""
    with on_a_node(root) as agent:
        engine = make_engine(offloading(stage, where, root, checkpoint={"ram": {}}))
        engine.load_checkpoint(checkpoints(root))
        loaded = engine.global_steps
        for step in range(loaded + 1, last + 1):
            train(engine, step)
            settle(engine)
        digest = engine.weight_hash() if last == STEPS else ""
        drop(engine)
        told = [m.step for m in agent.told() if isinstance(m, CommitRequest) and m.in_memory]
        return loaded, told, digest


def test_every_so_many_steps_counted_from_where_the_run_goes_on(
    worlds: WorldPool, root: str
) -> None:
    every = {"every_steps": 2}
    assert worlds.run(2, keep_steps, root, 1, 5, every)[0] == ([2, 4], 0)
    assert worlds.run(2, keep_steps, root, 1, 7, every)[0] == ([6], 4)


def test_the_agent_learns_what_each_save_in_memory_took(worlds: WorldPool, root: str) -> None:
    first, second = worlds.run(2, told_of_saves, root)
    for own in (first, second):
        assert [(one.step, one.committed, one.in_memory) for one in own] == [
            *((1, True, True), (2, True, True))
        ]
        assert all(one.stall_s > 0 and 0 < one.write_s <= one.total_s for one in own)
    assert first[0].whole_bytes == first[0].size_bytes + second[0].size_bytes > 0
    assert 0 < first[0].publish_s < first[0].total_s


def told_of_saves(root: str) -> list[Saved]:
    with on_a_node(root) as agent:
        engine = make_engine(in_memory(1))
        engine.load_checkpoint(checkpoints(root))
        for step in (1, 2, 3):  # the end of a save is told after the next step
            train(engine, step)
            settle(engine)
        drop(engine)
        return [message for message in agent.told() if isinstance(message, Saved)]


def test_a_refused_commit_leaves_the_one_before_and_is_said_once(
    worlds: WorldPool, root: str
) -> None:
    worlds.run(2, keep_steps, root, 1, 2, {})
    (lines, _) = worlds.run(2, train_refused, root)
    (why,) = [line for line in lines if "is not in memory" in line]
    assert why.startswith("step 3 is not in memory, step 2 still is: ")
    assert why.endswith("may not be published: round 4 is forming")
    assert worlds.run(2, keep_steps, root, 1, 3, {})[0] == ([3], 2)


def train_refused(root: str) -> list[str]:
    with on_a_node(root, grants=False), heard() as lines:
        engine = make_engine(in_memory(1))
        engine.load_checkpoint(checkpoints(root))
        for step in (3, 4, 5):
            train(engine, step)
            settle(engine)
        drop(engine)
    return lines


def offloads(engine: Engine) -> None:
    engine.offload_states()


def doubles_small(engine: Engine) -> None:
    """At stage 3 they are whole between uses."""
    with torch.no_grad():
        for param in engine.module.parameters():
            if param.dim() == 1 and param.numel():
                param.mul_(2.0)


FOLLOWS: dict[str, Callable[[Engine], None]] = {
    each.__name__: each for each in (offloads, doubles_small)
}


def follow_steps(root: str, how: str, last: int) -> tuple[int, list[int], str]:
    """A script that does something behind each step; where from, what was kept, the weights."""
    settings = in_memory(3) | {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    with on_a_node(root) as agent:
        engine = make_engine(settings)
        engine.load_checkpoint(checkpoints(root))
        loaded = engine.global_steps
        for batch in itertools.chain.from_iterable(itertools.repeat(engine.training_dataloader)):
            wait_for(lambda: not persistence_of(engine).ram.busy, 60, "the end of a save")
            engine.reload_states()
            if engine.global_steps == last:
                break
            engine.backward(engine(batch))
            before = engine.global_steps
            engine.step()
            if engine.global_steps > before:
                FOLLOWS[how](engine)
        digest = engine.weight_hash()
        drop(engine)
        told = [m.step for m in agent.told() if isinstance(m, CommitRequest) and m.in_memory]
    return loaded, told, digest


@pytest.mark.parametrize("how", FOLLOWS)
def test_what_a_script_does_to_the_states_behind_a_step_is_in_memory_or_delays_it(
    worlds: WorldPool, root: str, how: str
) -> None:
    """Those that are away are kept in memory where the next forward begins."""
    (alone := Path(root, "alone")).mkdir()
    (_, _, undisturbed), *_ = worlds.run(2, follow_steps, str(alone), how, STEPS)
    late = 1 if how == "offloads" else 0
    loaded, kept, _ = worlds.run(2, follow_steps, root, how, 3)[0]
    assert (loaded, kept) == (0, [1, 2, 3][: 3 - late])
    then = 3 - late, [3, 4, 5][1 - late : 3 - late], undisturbed
    assert worlds.run(2, follow_steps, root, how, STEPS)[0] == then


def test_the_last_step_of_an_epoch_is_in_memory_with_a_loader_of_deepspeed_io(
    worlds: WorldPool, root: str
) -> None:
    assert worlds.run(1, keep_an_epoch, root) == [[1]]


def keep_an_epoch(root: str) -> list[int]:
    with on_a_node(root) as agent:
        engine = make_engine(in_memory(), training_data=None)
        engine.load_checkpoint(checkpoints(root))
        for batch in engine.deepspeed_io(Tokens(10)):
            engine.backward(engine(batch))
            engine.step()
        settle(engine, comes_back=False)
        drop(engine)
        return [m.step for m in agent.told() if isinstance(m, CommitRequest) and m.in_memory]
