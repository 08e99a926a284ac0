"""Engines on nodes with a memory for checkpoints.

Each process of the pool is a node: its memory stays when an engine is dropped, as an agent's
stays when its worker dies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.numerics.test_leaving import Agent, under_agent
from tests.support.inside import persistence_of, session_of
from tests.support.training import config, make_engine, train
from tests.support.waiting import wait_for
from zero_agent.node.memory import NodeMemory
from zero_engine.core.engine import Engine
from zero_step import Session
from zero_step.session import come_back

STEPS = 5

MEMORIES: dict[str, NodeMemory] = {}
"""Of this process, by the directory of the test."""


@contextmanager
def on_a_node(root: str, **options: Any) -> Iterator[Agent]:
    """Under an agent whose memory is there from one call of the pool to the next."""
    ram = memory_of_this_node(root)
    Path(root, f"agent-{dist.get_rank()}.sock").unlink(missing_ok=True)
    with under_agent(root, memory=lambda request: ram.open(request, "secret"), **options) as agent:
        yield agent


def memory_of_this_node(root: str) -> NodeMemory:
    if root not in MEMORIES:
        directory = Path(root, f"shm-{dist.get_rank()}")
        directory.mkdir()
        MEMORIES[root] = NodeMemory("job", f"node-{dist.get_rank()}", "127.0.0.1", directory)
    return MEMORIES[root]


def checkpoints(root: str) -> Path:
    return Path(root) / "checkpoints"


def settle(engine: Engine | Session, *, comes_back: bool = True) -> None:
    """Until the checkpoint of the last step is committed, or is not."""
    if comes_back:
        come_back(session_of(engine))
    ram = persistence_of(engine).ram
    assert ram is not None
    wait_for(lambda: not ram.busy, 60, "the end of the save")
    dist.barrier()


def in_memory(stage: int = 0, **ram: Any) -> dict[str, Any]:
    return config(stage, checkpoint={"ram": ram})


def drop(training: Engine | Session) -> None:
    """As a crash does: nothing is finished, the memory of the node stays."""
    session_of(training)._link.close()


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


def run_alone() -> str:
    engine = make_engine(config(0))
    train(engine, STEPS)
    return engine.weight_hash()
