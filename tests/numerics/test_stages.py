"""One result at every stage and world size, and it is plain torch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.plain import plain_torch
from tests.support.training import config, fingerprint, make_engine, train
from tests.support.world import WorldPool
from zero_comm.exchange.cpu.same_host import SWITCH

STAGES = (0, 1, 2, 3)
STEPS = 4
"""Past the end of the first epoch, whose last step is short."""


def train_at_every_stage(bf16: bool, steps: int) -> list[tuple[Any, ...]]:
    fingerprints = []
    for stage in STAGES:
        engine = make_engine(config(stage, bf16=bf16))
        losses = train(engine, steps)
        fingerprints.append((*fingerprint(engine), tuple(losses)))
    return fingerprints


def train_once(settings: dict[str, Any], steps: int) -> dict[str, Any]:
    engine = make_engine(settings)
    train(engine, steps)
    return {name: value.numpy() for name, value in engine.module_state_dict().items()}


@pytest.fixture(scope="module")
def reference(worlds: WorldPool) -> dict[bool, tuple[Any, ...]]:
    """Weights, loss, norm, position and rates of one rank alone, at stage 0."""
    return {bf16: worlds.run(1, train_at_every_stage, bf16, STEPS)[0][0] for bf16 in (False, True)}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.corners(world=[1, 3])
def test_every_stage_and_world_size_gives_the_same_bits(
    worlds: WorldPool, reference: dict[bool, tuple[Any, ...]], world: int, bf16: bool
) -> None:
    results = worlds.run(world, train_at_every_stage, bf16, STEPS)
    assert results == [[reference[bf16]] * len(STAGES)] * world


@pytest.mark.parametrize("microbatches", [1, 4], ids=["one micro-batch", "four micro-batches"])
@pytest.mark.parametrize("clip", [0.0, 0.1], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.corners(microbatches=[4], clip=[0.1], dropout=[0.3])
def test_no_combination_of_options_depends_on_stage_or_world(
    worlds: WorldPool, microbatches: int, clip: float, dropout: float, bf16: bool
) -> None:
    settings = {"gradient_clipping": clip, "train_batch_size": 3 * microbatches}
    results = [
        state for world in (1, 2) for state in worlds.run(world, states, settings, dropout, bf16)
    ]
    first = results[0][0]
    for stages in results:
        for state in stages:
            assert all(np.array_equal(value, first[name]) for name, value in state.items())


def states(settings: dict[str, Any], dropout: float, bf16: bool) -> list[dict[str, Any]]:
    """The whole fp32 state_dict after two steps, per stage."""
    found = []
    for stage in STAGES:
        more = {"train_micro_batch_size_per_gpu": 3, **settings}
        engine = make_engine(config(stage, bf16=bf16, **more))
        for module in engine.module.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = dropout
        train(engine, 2)
        state = engine.get_fp32_state_dict()
        found.append({name: value.numpy() for name, value in state.items()})
    return found


def test_clipping_dropout_and_dtype_all_matter_to_the_hash(
    worlds: WorldPool, reference: dict[bool, tuple[Any, ...]]
) -> None:
    """The hash test above could otherwise pass with any of them switched off."""
    unclipped = worlds.run(1, train_once_hash, config(gradient_clipping=0))[0]
    reseeded = worlds.run(1, train_once_hash, config(seed=43))[0]
    assert len({reference[False][0], reference[True][0], unclipped, reseeded}) == 4


def train_once_hash(settings: dict[str, Any]) -> str:
    engine = make_engine(settings)
    train(engine, STEPS)
    return engine.weight_hash()


OPTIMIZERS: dict[str, dict[str, Any]] = {
    # The fused AdamW rounds the last elements of a tensor that does not fill a vector register in
    # another way, and plain torch steps tensors of odd sizes; the loop of single operations does
    # not depend on where a tensor ends.
    "AdamW": {"lr": 1e-2, "foreach": False},
    "SGD": {"lr": 0.1, "momentum": 0.9},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_what_plain_torch_computes_from_the_same_leaves(worlds: WorldPool, name: str) -> None:
    optimizer = {"type": name, "params": OPTIMIZERS[name]}
    settings = config(stage=2, gradient_clipping=0, optimizer=optimizer)
    ours = worlds.run(3, train_once, settings, STEPS)[0]
    theirs = plain_torch(STEPS, name, OPTIMIZERS[name])
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not np.array_equal(ours[key], theirs[key])] == []


def test_clipping_follows_torch_up_to_the_rounding_of_the_norm(worlds: WorldPool) -> None:
    optimizer = {"type": "SGD", "params": OPTIMIZERS["SGD"]}
    ours = worlds.run(2, train_once, config(stage=3, optimizer=optimizer), STEPS)[0]
    theirs = plain_torch(STEPS, "SGD", OPTIMIZERS["SGD"], clip=0.5)
    for key, value in ours.items():
        np.testing.assert_allclose(value, theirs[key], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("unwilling", [(), (2,), (0, 1, 2)], ids=["memory", "both", "sockets"])
@pytest.mark.corners(unwilling=[(2,)])
def test_memory_and_sockets_carry_the_same_bits(
    worlds: WorldPool, reference: dict[bool, tuple[Any, ...]], unwilling: tuple[int, ...]
) -> None:
    results = worlds.run(3, train_among, unwilling)
    together = 3 if not unwilling else 2 if unwilling == (2,) else 1
    for rank, (near, fingerprints) in enumerate(results):
        assert near == (1 if rank in unwilling else together)
        assert fingerprints == [reference[True]] * len(STAGES)


def train_among(unwilling: tuple[int, ...]) -> tuple[int, list[tuple[Any, ...]]]:
    """How many ranks exchange by memory with this one, and what comes of it."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() in unwilling:
            patch.setenv(SWITCH, "0")
        near = len(make_engine(config(2))._core.collectives.transports.of(torch.device("cpu")).near)
        return near, train_at_every_stage(True, STEPS)
