"""Saved at one world size and stage, loaded at another: every bit of the state, and of the run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.models import make_model
from tests.support.training import (
    DATASET_SIZE,
    config,
    fingerprint,
    make_engine,
    run_micro_step,
    train,
)
from tests.support.world import WorldError, WorldPool
from zero_engine.core.engine import Engine

STAGES = (0, 1, 2, 3)
SOURCES = [(stage, world) for world in (1, 2, 3) for stage in STAGES]
SAVED_AT, ENDS_AT = 2, 4
"""Steps; the position of the save is in the first epoch, that of the end in the second."""


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def engine_at(stage: int, bf16: bool, *, seed: int = 7) -> Engine:
    return make_engine(config(stage, bf16=bf16), seed=seed, lr_scheduler=halving)


def state_of(engine: Engine) -> tuple[Any, ...]:
    """This rank's pieces by digest, and what all ranks share."""
    state = engine._state.capture({}, {})
    pieces = {
        (piece.id.kind, piece.id.fqn, piece.start): piece.data.view(torch.uint8).numpy().tobytes()
        for piece in state.pieces
    }
    buffers = {name: value.tolist() for name, value in engine.module.named_buffers()}
    position = (engine.global_steps, engine.global_samples, engine.micro_steps > 0)
    return pieces, (state.meta["engine"], buffers, position[:2], dict(state.aliases))


def uninterrupted(bf16: bool) -> str:
    engine = engine_at(0, bf16)
    train(engine, ENDS_AT)
    return engine.weight_hash()


# ---- what a load must refuse, or say ----


def save_here(root: str, steps: int) -> str:
    engine = engine_at(1, False)
    train(engine, steps)
    engine.save_checkpoint(root)
    return engine.weight_hash()


def test_an_empty_directory_is_a_start_from_scratch(worlds: WorldPool, tmp_path: Path) -> None:
    assert worlds.run(2, load_nothing, str(tmp_path / "none")) == [(None, {}, 0)] * 2


def load_nothing(root: str) -> tuple[Any, ...]:
    engine = engine_at(2, False)
    return (*engine.load_checkpoint(root), engine.global_steps)


def test_a_checkpoint_from_before_the_first_step_has_no_moments_and_loads(
    worlds: WorldPool, tmp_path: Path
) -> None:
    worlds.run(2, save_here, str(tmp_path), 0)
    assert (
        worlds.run(3, load_into_trained, str(tmp_path))
        == [worlds.run(1, uninterrupted, False)[0]] * 3
    )


def load_into_trained(root: str) -> str:
    """Going back to the beginning must also forget the moments there are."""
    engine = engine_at(3, False, seed=8)
    train(engine, 1)
    engine.load_checkpoint(root)
    train(engine, ENDS_AT)
    return engine.weight_hash()


def test_a_tag_names_an_earlier_checkpoint(worlds: WorldPool, tmp_path: Path) -> None:
    assert worlds.run(2, save_twice_load_first, str(tmp_path)) == [1, 1]


def save_twice_load_first(root: str) -> int:
    engine = engine_at(1, False)
    for steps in (1, 2):
        train(engine, steps)
        engine.save_checkpoint(root)
    engine.load_checkpoint(root, tag="global_step1")
    return engine.global_steps


def test_other_param_groups_are_refused_by_name(worlds: WorldPool, tmp_path: Path) -> None:
    worlds.run(1, save_here, str(tmp_path), 1)
    with pytest.raises(
        WorldError, match=r"in other param groups .*for example blocks\.0\.down\.bias"
    ):
        worlds.run(2, load_with_one_group, str(tmp_path))


def load_with_one_group(root: str) -> None:
    make_engine(config(1), model_parameters=None, lr_scheduler=halving).load_checkpoint(root)


def test_a_client_state_comes_back_as_it_went_in(worlds: WorldPool, tmp_path: Path) -> None:
    assert worlds.run(1, save_random_states, str(tmp_path)) == [[True] * 5]


def save_random_states(root: str) -> list[bool]:
    """As scripts keep them: tuples, a tensor, an array."""
    engine = engine_at(3, False)
    states = {"python": random.getstate(), "torch": torch.get_rng_state(), "best": torch.ones(2)}
    engine.save_checkpoint(root, client_state=states | {"numpy": np.random.get_state()})
    drawn = random.random(), torch.rand(1), np.random.random()
    _, found = engine.load_checkpoint(root)
    random.setstate(found["python"])
    torch.set_rng_state(found["torch"])
    np.random.set_state(found["numpy"])
    return [
        random.random() == drawn[0],
        torch.equal(torch.rand(1), drawn[1]),
        np.random.random() == drawn[2],
        torch.equal(found["best"], torch.ones(2)),
        "ds_version" in found,  # Lightning looks for it
    ]


def test_a_client_state_that_cannot_be_stored_is_refused_by_name_and_nothing_is_saved(
    worlds: WorldPool, tmp_path: Path
) -> None:
    with pytest.raises(WorldError, match=r"client_state\.best\[1\] is a set, which no checkpoint"):
        worlds.run(2, save_set, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def save_set(root: str) -> None:
    engine_at(0, False).save_checkpoint(root, client_state={"best": [1, {2}]})


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("stepped", [True, False])
@pytest.mark.corners(stage=[3])
def test_a_save_inside_of_a_step_is_that_of_the_step_before_and_changes_nothing(
    worlds: WorldPool, tmp_path: Path, stage: int, stepped: bool
) -> None:
    undisturbed = worlds.run(2, train_on_after_a_save, stage, stepped, None)
    assert worlds.run(2, train_on_after_a_save, stage, stepped, str(tmp_path)) == undisturbed
    assert worlds.run(3, resume_from_inside, stage, str(tmp_path)) == [undisturbed[0]] * 3


def train_on_after_a_save(stage: int, stepped: bool, root: str | None) -> tuple[Any, ...]:
    engine = engine_at(stage, False)
    train(engine, 1)
    run_micro_step(engine, step=stepped)
    if root is not None:
        assert engine.save_checkpoint(root)
    if not stepped:
        engine.step()
    train(engine, 3)
    return fingerprint(engine)


def resume_from_inside(stage: int, root: str) -> tuple[Any, ...]:
    engine = engine_at(stage, False)
    assert engine.load_checkpoint(root)[0] is not None
    assert engine.global_steps == 1
    train(engine, 3)
    return fingerprint(engine)


def test_a_batch_fixed_by_the_first_worlds_size_stays_at_the_next(
    worlds: WorldPool, tmp_path: Path
) -> None:
    assert worlds.run(3, first_world, str(tmp_path)) == [(12, 2)] * 3
    assert worlds.run(2, next_world, str(tmp_path)) == [(12, 3)] * 2


MICRO_ONLY = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


def first_world(root: str) -> tuple[int, int]:
    engine = make_engine(MICRO_ONLY)
    train(engine, 1)
    engine.save_checkpoint(root)
    return engine.train_batch_size(), engine.gradient_accumulation_steps()


def next_world(root: str) -> tuple[int, int]:
    engine = make_engine(MICRO_ONLY)
    engine.load_checkpoint(root)
    train(engine, 2)
    assert engine.global_samples == DATASET_SIZE  # 12, and then the 11 that are left
    return engine.train_batch_size(), engine.gradient_accumulation_steps()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.corners(stage=[3])
def test_a_sum_of_gradients_is_over_the_first_worlds_ranks_at_every_later_world(
    worlds: WorldPool, tmp_path: Path, stage: int
) -> None:
    """Twice the mean is, at half the learning rate, the same steps to the bit."""
    mean = worlds.run(1, step_on, stage, "mean", 0.25, None, 2)
    worlds.run(2, step_on, stage, "Sum", 0.125, str(tmp_path), 1)
    assert worlds.run(3, step_on, stage, "Sum", 0.125, str(tmp_path), 2) == mean * 3


def step_on(stage: int, op: str, lr: float, root: str | None, until: int) -> str:
    """Go on until this step, with gradients reduced so, from and to the checkpoints there."""
    settings = {
        **config(stage),
        "gradient_allreduce_op": op,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": lr}},
    }
    engine = make_engine(settings, model_parameters=None)
    if root is not None:
        engine.load_checkpoint(root)
    train(engine, until)
    if root is not None:
        engine.save_checkpoint(root)
    return engine.weight_hash()


def test_a_model_that_has_changed_is_refused_by_name(worlds: WorldPool, tmp_path: Path) -> None:
    worlds.run(1, save_here, str(tmp_path), 1)
    with pytest.raises(WorldError, match="extra"):
        worlds.run(2, load_into_another_model, str(tmp_path))


def load_into_another_model(root: str) -> None:
    model = make_model()
    del model.unused
    make_engine(config(1), model=model).load_checkpoint(root)
