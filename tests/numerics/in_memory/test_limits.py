"""Checkpoints in memory, made by engines: too little memory, none, or a silent neighbour's."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed as dist
from msgspec.structs import replace

from tests.numerics.in_memory.nodes import (
    checkpoints,
    drop,
    in_memory,
    memory_of_this_node,
    on_a_node,
    settle,
)
from tests.numerics.test_leaving import under_agent
from tests.support.inside import persistence_of
from tests.support.saving import heard
from tests.support.suspended import suspend
from tests.support.training import make_engine, train
from tests.support.world import WorldPool
from zero_checkpoint import find
from zero_checkpoint.saving.in_memory import needed_bytes, over_budget
from zero_contract import peer_memory
from zero_contract.worker import PeerMemoryReply, PeerMemoryRequest


@pytest.mark.full
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


@pytest.mark.full
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
from zero_agent.node.memory import NodeMemory
from zero_contract.worker import PeerMemoryRequest
memory = NodeMemory("job", "stopped", "127.0.0.1")
print(memory.open(PeerMemoryRequest(request=1), "secret").address, flush=True)
sys.stdin.read()
"""


@pytest.mark.full
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
        # Four steps are to be over before that, on a slow machine, too.
        pytest.MonkeyPatch.context() as patch,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as stopped,
    ):
        patch.setattr(peer_memory, "CONNECT_TIMEOUT_S", 10.0)
        assert stopped.stdout is not None
        address = stopped.stdout.readline().strip()
        suspend(stopped.pid)
        own = memory_of_this_node(root)

        def memory(request: PeerMemoryRequest) -> PeerMemoryReply:
            reply = own.open(request, "secret")
            return replace(reply, address=address) if dist.get_rank() == 1 else reply

        with under_agent(root, memory=memory):
            engine = make_engine(in_memory(1))
            engine.load_checkpoint(checkpoints(root))
            train(engine, 1)
            busy = []
            for step in (2, 3, 4):
                train(engine, step)
                assert persistence_of(engine).ram is not None
                busy.append(persistence_of(engine).ram.busy)
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
