"""Checkpoints in memory, made by engines: which steps are kept, of which runs, at what price.

Each process of the pool is a node: its memory stays when an engine is dropped, as an agent's
stays when its worker dies.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.numerics.test_leaving import Agent, under_agent
from tests.numerics.test_offload import offloading
from tests.support.saving import heard
from tests.support.training import config, make_engine, train
from tests.support.waiting import wait_for
from tests.support.world import WorldPool
from zero_agent.ram import Ram
from zero_engine.checkpoint import find
from zero_engine.engine import Engine
from zero_engine.ram_tier import needed_bytes, over_budget
from zero_orchestrator.contract import CommitRequest, RamReply, RamRequest

STEPS = 5
MEMORIES: dict[str, Ram] = {}
"""Of this process, by the directory of the test."""


@contextmanager
def on_a_node(root: str, **options: Any) -> Iterator[Agent]:
    """Under an agent whose memory is there from one call of the pool to the next."""
    ram = memory_of_this_node(root)
    Path(root, f"agent-{dist.get_rank()}.sock").unlink(missing_ok=True)
    with under_agent(root, memory=lambda request: ram.open(request, "secret"), **options) as agent:
        yield agent


def memory_of_this_node(root: str) -> Ram:
    if root not in MEMORIES:
        directory = Path(root, f"shm-{dist.get_rank()}")
        directory.mkdir()
        MEMORIES[root] = Ram("job", f"node-{dist.get_rank()}", "127.0.0.1", directory)
    return MEMORIES[root]


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path)


def checkpoints(root: str) -> Path:
    return Path(root) / "checkpoints"


def settle(engine: Engine) -> None:
    """Until the checkpoint of the last step is committed, or is not."""
    ram = engine._persistence.ram
    assert ram is not None
    wait_for(lambda: not ram.busy, 20, "the end of the save")
    dist.barrier()


def in_memory(stage: int = 0, **ram: Any) -> dict[str, Any]:
    return config(stage, checkpoint={"ram": ram})


def drop(engine: Engine) -> None:
    """As a crash does: nothing is finished, the memory of the node stays."""
    engine._link.close()


# ---- which steps ----


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
        return [m.step for m in agent.told() if isinstance(m, CommitRequest) and m.in_ram], loaded


def finish(root: str, stage: int) -> tuple[int, str]:
    with on_a_node(root):
        engine = make_engine(in_memory(stage), seed=8)
        engine.load_checkpoint(checkpoints(root))
        loaded = engine.global_steps
        train(engine, STEPS)
        settle(engine)
        digest = engine.weight_hash()
        drop(engine)
        return loaded, digest


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
        told = [m.step for m in agent.told() if isinstance(m, CommitRequest) and m.in_ram]
        return loaded, told, digest


def run_alone() -> str:
    engine = make_engine(config(0))
    train(engine, STEPS)
    return engine.weight_hash()


def test_every_so_many_steps_counted_from_where_the_run_goes_on(
    worlds: WorldPool, root: str
) -> None:
    every = {"every_steps": 2}
    assert worlds.run(2, keep_steps, root, 1, 5, every)[0] == ([2, 4], 0)
    assert worlds.run(2, keep_steps, root, 1, 7, every)[0] == ([6], 4)


def test_a_refused_commit_leaves_the_one_before_and_is_said_once(
    worlds: WorldPool, root: str
) -> None:
    worlds.run(2, keep_steps, root, 1, 2, {})
    (lines, _) = worlds.run(2, train_refused, root)
    (why,) = [line for line in lines if "no checkpoint in memory" in line]
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


# ---- of which runs ----


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
    assert [line for line in lines if "engine.keep_client_state() tells more" in line]
    assert worlds.run(2, loaded_state, root) == [(2, {"best": 2})] * 2
    worlds.run(2, train_with_state, root, True)
    assert worlds.run(2, loaded_state, root) == [(4, {"best": 4})] * 2


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
        return engine.global_steps, client


# ---- at what price ----


def test_a_budget_that_does_not_suffice_is_said_once_and_checkpoints_go_to_disk(
    worlds: WorldPool, root: str
) -> None:
    lines, others = worlds.run(2, train_with_budget, root, 1000)
    (why,) = [line for line in lines if "memory" in line]
    assert why.startswith("no checkpoints in memory, only on disk: rank 0: they need ")
    assert "the budget is 0.0 MiB; raise checkpoint.ram.budget_bytes" in why
    assert [line for line in others if "memory" in line] == []
    assert [c.manifest.step for c in find(checkpoints(root)).candidates] == [3]


def train_with_budget(root: str, budget_bytes: int) -> list[str]:
    with on_a_node(root), heard() as lines:
        engine = make_engine(in_memory(1, budget_bytes=budget_bytes))
        engine.load_checkpoint(checkpoints(root))
        for step in (1, 2, 3):
            train(engine, step)
            settle(engine)
        engine.save_checkpoint(checkpoints(root))
        drop(engine)
    return lines


def test_without_an_agent_checkpoints_go_to_disk_and_it_is_said(
    worlds: WorldPool, root: str
) -> None:
    lines, _ = worlds.run(2, train_without_agent, root)
    (why,) = [line for line in lines if "memory" in line]
    assert why.endswith("only on disk: rank 0: there is no zero-agent to keep them")


def train_without_agent(root: str) -> list[str]:
    with heard() as lines:
        engine = make_engine(in_memory(1))
        engine.load_checkpoint(checkpoints(root))
        for step in (1, 2):
            train(engine, step)
            settle(engine)
    return lines


_STOPPED = """
import sys
from zero_agent.ram import Ram
from zero_orchestrator.contract import RamRequest
print(Ram("job", "stopped", "127.0.0.1").open(RamRequest(request=1), "secret").address, flush=True)
sys.stdin.read()
"""


def test_a_stopped_neighbour_does_not_hold_training_up(worlds: WorldPool, root: str) -> None:
    """Rank 1's memory does not answer: four steps are done while rank 0 still waits for it."""
    (busy, lines), _ = worlds.run(2, train_beside_a_stopped_memory, root)
    assert busy == [True, True, True]
    (why,) = [line for line in lines if "without some copies" in line]
    assert why.endswith("took no copy: timed out")


def train_beside_a_stopped_memory(root: str) -> tuple[list[bool], list[str]]:
    command = [sys.executable, "-c", _STOPPED]
    with (
        heard() as lines,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as stopped,
    ):
        assert stopped.stdout is not None
        address = stopped.stdout.readline().strip()
        stopped.send_signal(signal.SIGSTOP)
        own = memory_of_this_node(root)

        def memory(request: RamRequest) -> RamReply:
            reply = own.open(request, "secret")
            return replace(reply, address=address) if dist.get_rank() == 1 else reply

        with under_agent(root, memory=memory):
            engine = make_engine(in_memory(1))
            engine.load_checkpoint(checkpoints(root))
            train(engine, 1)
            busy = []
            for step in (2, 3, 4):
                train(engine, step)
                assert engine._persistence.ram is not None
                busy.append(engine._persistence.ram.busy)
            settle(engine)
            drop(engine)
        stopped.kill()
    return busy, lines


@pytest.mark.parametrize(
    ("workers", "replicas", "needed"), [(1, 0, 200), (1, 1, 400), (4, 1, 1600), (2, 2, 1200)]
)
def test_memory_is_two_images_of_each_worker_and_of_each_copy(workers, replicas, needed):
    assert needed_bytes(100, workers, replicas) == needed
    assert over_budget(needed, needed) == ""
    assert over_budget(needed, needed - 1) != ""
