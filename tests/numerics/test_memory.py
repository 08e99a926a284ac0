"""The memory estimate is what an engine really allocates."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_deepspeed
from tests.support.inside import persistence_of
from tests.support.training import config, make_engine, train
from tests.support.world import WorldPool
from zero_comm.sums import additions
from zero_comm.sums.buffer_pool import BufferPool
from zero_comm.sums.plan import Where
from zero_comm.topology import ENV_NODE_RANKS, Topology
from zero_engine.config import load_config
from zero_engine.config.schema import (
    Bf16,
    Config,
    OffloadOptimizer,
    OptimizerConfig,
    ZeroOptimization,
)
from zero_engine.layout import Facts, resolve
from zero_engine.observe.memory import estimate
from zero_engine.tiers.nvme import Nvme

WIDTH, LAYERS = 512, 3
PARAMETERS = LAYERS * WIDTH * (WIDTH + 1)
STATES = {"Adam": 2, "Lion": 1, "SGD": 0, "Muon": 1}
PRECISIONS: dict[str, dict[str, bool]] = {
    "fp32": {},
    "bf16": {"enabled": True},
    "bf16 masters": {"enabled": True, "bf16_master_weights_and_grads": True},
    "all bf16": {
        "enabled": True,
        "bf16_master_weights_and_grads": True,
        "bf16_optimizer_states": True,
    },
}


class Stack(nn.Module):
    def __init__(self, depth: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


def allocated(stage: int, compute: str, optimizer: str) -> dict[str, int]:
    """Bytes of distinct storage that an engine keeps between steps, by purpose."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": optimizer, "params": {"lr": 1e-3}},
        "bf16": PRECISIONS[compute],
    }
    engine, *_ = zero_deepspeed.initialize(model=Stack(), config=settings)
    dtype = torch.float32 if compute == "fp32" else torch.bfloat16
    engine.backward(engine(torch.ones(1, WIDTH, dtype=dtype)))
    engine.step()
    core = engine._core
    assert core.zero is not None
    assert core.reducer is not None
    moments = [v for state in core.zero.optimizer.state.values() for v in state.values()]
    unreduced = [g.buffer for g in core.reducer._order if g.buffer is not None]
    sums = list(core.zero.gradient_sums())
    seen: set[int] = set()
    return {
        "weights": storage([unit.full for unit in core.units], seen),
        "master": storage([t for unit in core.units for t in (unit.shard, unit.master)], seen),
        "moments": storage([v for v in moments if isinstance(v, Tensor) and v.dim()], seen),
        "gradients": storage([*sums, *unreduced], seen),
    }


def storage(tensors: list[Tensor], seen: set[int]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    fresh = {pointer: size for pointer, size in storages.items() if pointer not in seen}
    seen.update(fresh)
    return sum(fresh.values())


@pytest.mark.parametrize(
    ("stage", "compute", "world"),
    [
        *((stage, "bf16", 2) for stage in range(4)),
        (0, "fp32", 2),
        (2, "fp32", 1),
        (3, "fp32", 2),
        (2, "bf16 masters", 1),
        (3, "bf16 masters", 2),
        (1, "all bf16", 2),
        (3, "all bf16", 2),
    ],
)
def test_the_estimate_is_what_is_allocated_up_to_padding(
    worlds: WorldPool, stage: int, compute: str, world: int
) -> None:
    optimizer = list(STATES)[stage] if compute in ("fp32", "bf16") else "Adam"
    expected = estimate(
        Config(
            bf16=Bf16(**PRECISIONS[compute]),
            zero_optimization=ZeroOptimization(stage=stage),
            optimizer=OptimizerConfig(type=optimizer),
        ),
        PARAMETERS,
        world,
        device="cpu",
    )
    for rank in worlds.run(world, allocated, stage, compute, optimizer):
        for purpose, size in rank.items():
            assert size == pytest.approx(getattr(expected, purpose), rel=0.02), purpose


def buffers_of_one_step(stage: int) -> list[int]:
    """The elements of each gradient buffer that a step asks for besides its sums."""
    asked = []

    class Asked(BufferPool):
        def take(self, numel: int, dtype: torch.dtype) -> Tensor:
            asked.append(numel)
            return super().take(numel, dtype)

    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
    }
    engine, *_ = zero_deepspeed.initialize(model=Stack(), config=settings)
    assert engine._core.reducer is not None
    reducer = engine._core.reducer
    reducer.pipeline.reduction.pool = Asked(torch.device("cpu"))
    engine.backward(engine(torch.ones(1, WIDTH)))
    engine.step()
    return asked


def test_at_stage_0_in_fp32_leaves_lie_where_their_sums_will_be(worlds: WorldPool) -> None:
    unit = 2 * 1024 * -(-WIDTH * (WIDTH + 1) // 2048)
    received, sent = [unit // 2] * LAYERS, [unit] * LAYERS
    for rank in worlds.run(2, buffers_of_one_step, 0):
        assert rank == received
    for rank in worlds.run(2, buffers_of_one_step, 2):
        assert sorted(rank) == [*received, *sent]


class Counted(BufferPool):
    """Counts the memory that it has taken of the system and not given back."""

    now_bytes = most_bytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        fresh = not self._idle[numel, dtype, self._stream()]
        taken = super().take(numel, dtype)
        if fresh:
            self.now_bytes += taken.nbytes
            weakref.finalize(taken, self._forget, taken.nbytes)
        self.most_bytes = max(self.most_bytes, self.now_bytes)
        return taken

    def _forget(self, size_bytes: int) -> None:
        self.now_bytes -= size_bytes


def most_under_way(
    nodes: str, where: str, compute: str, micro_steps: int, rounded_block: int | None = None
) -> tuple[int, int]:
    """The memory of gradients under way and held in one step, and the elements of a unit."""
    os.environ[ENV_NODE_RANKS] = nodes
    count = sum(map(int, nodes.split(","))) * micro_steps
    dtype = torch.float32 if compute == "fp32" else torch.bfloat16
    settings = {
        "train_batch_size": count,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 1 if where == "local" else 2,
            "zero_quantized_gradients": rounded_block is not None,
        },
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "bf16": {"enabled": compute == "bf16"},
        "elastic": {"accumulate": where, "reduction_block": rounded_block},
    }
    data: Any = [torch.ones(WIDTH, dtype=dtype)] * count
    try:
        engine, *_ = zero_deepspeed.initialize(
            model=Stack(UNITS), training_data=data, config=settings
        )
    finally:
        del os.environ[ENV_NODE_RANKS]
    assert engine._core.reducer is not None
    reducer = engine._core.reducer
    reducer.pipeline.reduction.pool = pool = Counted(torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(additions, "_PIECE", 1 << 12)  # as little beside units as of real ones
        for batch in engine.training_dataloader or ():
            engine.backward(engine(batch))
            engine.step()
    assert engine.global_steps == 1
    return pool.most_bytes, engine._core.units[0].padded


UNITS = 8
"""More than are ever under way."""


@pytest.mark.parametrize("nodes", [(2, 2), (3, 1)])
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
@pytest.mark.parametrize("where", list(Where))
@pytest.mark.corners(nodes=[(2, 2)], compute=["bf16"], where=[Where.OWNER])
def test_the_estimate_counts_the_gradients_that_are_added_inside_of_nodes(
    worlds: WorldPool, nodes: tuple[int, ...], compute: str, where: Where
) -> None:
    """A rank of the worst place meets it. Between nodes, in fp32, what is held is counted, too."""
    micro_steps, size = 1 if where is Where.OWNER else 3, {"bf16": 2, "fp32": 4}[compute]
    config = load_config({"elastic": {"accumulate": where.value}})
    chosen = resolve(config, Facts(topology=Topology(nodes=nodes))).sums
    found = worlds.run(
        4, most_under_way, ",".join(map(str, nodes)), where.value, compute, micro_steps
    )
    (_, unit), *_ = found
    travelling = chosen.most_under_way(4 * micro_steps, size)
    assert travelling is not None
    held = [chosen.most_kept_bytes(4 * micro_steps, rank, UNITS * unit) for rank in range(4)]
    expected = (size + travelling) * unit + max(held)
    most = max(bytes_ for bytes_, _ in found)
    assert most <= expected
    if where is Where.OWNER:
        assert most == pytest.approx(expected, rel=0.15)


def test_the_estimate_counts_blocks_that_travel_as_int8() -> None:
    """Nodes of eight in bf16: being filled and being exchanged, what is received of it, a rank's
    slice of the node's sum and its codes, and at an owner codes and sums of eight nodes."""
    settings = {
        "train_batch_size": 512,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2, "zero_quantized_gradients": True},
        "bf16": {"enabled": True},
    }
    codes, unit = 1 + 4 / 256, 1 << 20
    size = estimate(load_config(settings), 64 * unit, 64, unit, node_ranks=8).in_flight
    assert size == round((2 + 2 + 2 * 7 / 8 + (4 + codes) * (1 / 8 + 8 / 64)) * unit)


@pytest.mark.full
def test_blocks_that_travel_as_int8_take_no_more_than_that(worlds: WorldPool) -> None:
    found = worlds.run(4, most_under_way, "2,2", "owner", "bf16", 1, 2)
    settings = {
        "zero_optimization": {"zero_quantized_gradients": True},
        "elastic": {"reduction_block": 2},
    }
    facts = Facts(topology=Topology(nodes=(2, 2)))
    travelling = resolve(load_config(settings), facts).sums.most_under_way(4, 2)
    assert travelling is not None
    assert max(bytes_ for bytes_, _ in found) <= (2 + travelling) * found[0][1]


def secondary_shards() -> int:
    """Bytes that the ranks of a node keep of the weights between two uses."""
    zero = {"stage": 3, "zero_hpz_partition_size": 2}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
    }
    engine, *_ = zero_deepspeed.initialize(model=Stack(), config=settings)
    loss = engine(torch.ones(1, WIDTH, dtype=torch.bfloat16))
    kept = [unit.wire.secondary for unit in engine._core.units]
    size = storage([tensor for tensor in kept if tensor is not None], set())
    engine.backward(loss)
    engine.step()
    assert [unit.wire.secondary for unit in engine._core.units] == [None] * LAYERS
    return size


def test_the_estimate_knows_the_secondary_shards_of_a_node(worlds: WorldPool) -> None:
    config = Config(
        bf16=Bf16(enabled=True),
        zero_optimization=ZeroOptimization(stage=3, zero_hpz_partition_size=2),
    )
    expected = estimate(config, PARAMETERS, 4).weights
    assert worlds.run(4, secondary_shards) == [pytest.approx(expected, rel=0.02)] * 4
    assert expected == PARAMETERS


@pytest.mark.parametrize("optimizer", ["Adam", "Muon"])
@pytest.mark.parametrize("world", [1, 2])
def test_on_a_disk_each_parameter_has_room_for_its_own_state_alone(
    worlds: WorldPool, tmp_path: Path, optimizer: str, world: int
) -> None:
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = Config(
        bf16=Bf16(enabled=True),
        zero_optimization=ZeroOptimization(stage=3, offload_optimizer=OffloadOptimizer(**offload)),
        optimizer=OptimizerConfig(type=optimizer),
    )
    expected = estimate(config, PARAMETERS, world)
    for size in worlds.run(world, bytes_on_disk, optimizer, offload):
        # The weights that modules are gathered from rest in memory.
        assert size == pytest.approx(expected.disk, rel=0.06)


def bytes_on_disk(optimizer: str, offload: dict[str, Any]) -> int:
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "offload_optimizer": offload},
        "optimizer": {"type": optimizer, "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
    }
    engine, *_ = zero_deepspeed.initialize(model=Stack(), config=settings)
    engine.backward(engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)))
    engine.step()
    (tier,) = {unit.tiers.state for unit in engine._core.units}
    assert isinstance(tier, Nvme)
    return tier.file.size_bytes


def is_freed_at_once(root: str) -> bool:
    """Whether what saves an engine is gone with the engine, without a garbage collection."""
    gc.collect()
    gc.disable()
    try:
        engine = make_engine(config(1))
        train(engine, 1)
        engine.save_checkpoint(root)
        saving = weakref.ref(persistence_of(engine))
        del engine
        return saving() is None
    finally:
        gc.enable()


def test_an_engine_that_has_saved_is_freed_when_the_script_drops_it(
    worlds: WorldPool, tmp_path: Path
) -> None:
    assert worlds.run(2, is_freed_at_once, str(tmp_path)) == [True, True]
