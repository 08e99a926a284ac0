"""The benchmarks' model of a step's traffic is what ranks really send, between and inside nodes."""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_deepspeed
from tests.support.world import WorldPool
from zero_comm.exchange.collectives import Collectives
from zero_comm.sums.node import NodeReduction
from zero_comm.topology import ENV_NODE_RANKS
from zero_engine.core.engine import Engine

WIDTH = 48
Sent = tuple[int, int]
"""Bytes between nodes and inside of them."""

SYSTEMS = {
    **{f"zero{stage}": (stage, "owner") for stage in range(4)},
    "zero0-local": (0, "local"),
    "zero1-local": (1, "local"),
    "zero2-node": (2, "node"),
    "zero3-node": (3, "node"),
}
"""As `training_traffic` names them: the stage, and where the sums of micro-steps are formed."""


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The model."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("training_traffic")


class Scaled(nn.Module):
    """Layers, and a parameter of the root, which stays gathered in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


def started(stage: int, where: str, block: int, micro_batches: int) -> Engine:
    settings = {
        "train_batch_size": micro_batches,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "elastic": {"accumulate": where, "reduction_block": block},
    }
    data: Any = [torch.ones(WIDTH, dtype=torch.bfloat16)] * micro_batches
    engine, *_ = zero_deepspeed.initialize(model=Scaled(), training_data=data, config=settings)
    assert engine._core.layout.sums.where == where
    return engine


def count(group: Collectives, sent: Counter[str]) -> None:
    """Count the bytes of tensors that a rank sends to others, by the place of the other."""
    transport = group.transports.of(torch.device("cpu"))
    exchange: Callable[..., Any] = transport.exchange
    own, _ = group.topology.place(group.rank)

    def counted(held: Mapping[int, Tensor], *rest: Any) -> Any:
        for rank, tensor in held.items():
            node, _ = group.topology.place(rank)
            sent["inside" if node == own else "between"] += tensor.nbytes
        return exchange(held, *rest)

    gather: Callable[..., Any] = transport.gather

    def apart(*given: Any) -> Any:
        """What ranks tell each other at the end of a step is in no model."""
        before = Counter(sent)
        works = gather(*given)
        sent.clear()
        sent.update(before)
        return works

    transport.exchange = counted  # type: ignore[method-assign]
    transport.gather = apart  # type: ignore[method-assign]


def step_of_each(
    ranks_of_node: int, blocks: Mapping[str, int], accumulation: int
) -> list[tuple[Sent, int, int]]:
    """Of each system: what a rank sends in a step, and the elements of all units but the root's."""
    os.environ[ENV_NODE_RANKS] = str(ranks_of_node)
    world, found = torch.distributed.get_world_size(), []
    try:
        for system, (stage, where) in SYSTEMS.items():
            engine = started(stage, where, blocks[system], world * accumulation)
            core, sent = engine._core, Counter[str]()
            assert core.reducer is not None
            reduction = core.reducer.pipeline.reduction
            assert isinstance(reduction, NodeReduction)
            for group in {core.collectives, reduction.collectives, reduction.between}:
                count(group, sent)
            for batch in engine.training_dataloader or ():
                engine.backward(engine(batch))
                engine.step()
            assert engine.global_steps == 1
            elements = sum(unit.padded for unit in core.units)
            root = sum(unit.padded for unit in core.units if unit.spec.is_root)
            assert root
            found.append(((sent["between"], sent["inside"]), elements, elements - root))
    finally:
        del os.environ[ENV_NODE_RANKS]
    return found


@pytest.mark.parametrize("nodes", [(2, 2), (4, 4), (2, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("accumulation", [1, 2, 8])
@pytest.mark.corners(nodes=[(2, 2)], accumulation=[2])
def test_the_model_of_a_step_is_what_its_ranks_send_to_the_byte(
    worlds: WorldPool, traffic: ModuleType, nodes: tuple[int, ...], accumulation: int
) -> None:
    blocks = {
        system: traffic.DEFAULT_BLOCK if where == "owner" else traffic.NODE_BLOCK
        for system, (_, where) in SYSTEMS.items()
    }
    ranks = worlds.run(sum(nodes), step_of_each, nodes[0], blocks, accumulation)
    for system, of_ranks in zip(SYSTEMS, zip(*ranks, strict=True), strict=True):
        _, elements, regathered = of_ranks[0]
        job = traffic.Job(
            nodes=nodes,
            elements=elements,
            regathered=regathered,
            dtype="bf16",
            accumulation=accumulation,
        )
        model = traffic.MODELS[system](job)
        between, inside = (sum(sent[part] for sent, *_ in of_ranks) for part in (0, 1))
        assert (between, inside) == (model.between, model.inside), system
