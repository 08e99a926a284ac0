"""A node's memory for checkpoints, served by a process of its own, as an agent does.

Called by `checkpoint_worker`, one for each rank: every rank stands for a node.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from zero_agent.node.memory import NodeMemory
from zero_checkpoint.memory.node import MemoryNode
from zero_contract.worker import PeerMemoryRequest

JOB, SECRET = "benchmark", "of this benchmark"


@contextmanager
def node_memory(rank: int, budget_bytes: int) -> Iterator[MemoryNode]:
    """The memory of one node, until the block ends."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    agent = context.Process(target=_serve, args=(there, rank, budget_bytes))
    agent.start()
    try:
        yield here.recv()
    finally:
        here.send("end")
        agent.join()


def _serve(pipe: Connection, rank: int, budget_bytes: int) -> None:
    memory = NodeMemory(JOB, f"n{rank}", "127.0.0.1")
    reply = memory.open(PeerMemoryRequest(request=1, budget_bytes=budget_bytes), SECRET)
    if not reply.directory:
        raise SystemExit(reply.reason)
    node = MemoryNode(
        directory=Path(reply.directory),
        address=reply.address,
        key=reply.key,
        budget_bytes=reply.budget_bytes,
    )
    pipe.send(node)
    pipe.recv()
    memory.close()
