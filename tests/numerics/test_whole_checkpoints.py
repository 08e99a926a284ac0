"""Checkpoints of optimizers that step whole parameters: state in shapes of its own, found again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_deepspeed
from tests.numerics.test_whole_parameters import ADAFACTOR, STEPS, Kronecker, with_object
from tests.support.training import config, make_engine, train
from tests.support.world import WorldError, WorldPool, one_result
from zero_contract.errors import ZeroError

SAVED_AT = 2


def train_to(steps: int, how: str, stage: int, load: str | None, save: str | None) -> str:
    seed, more = 9 if load else 7, {"checkpoint": {"async": True}}
    if how == "own":
        engine = with_object(stage, seed=seed, **more)
    else:
        settings = config(stage, bf16=True, gradient_clipping=0, optimizer=ADAFACTOR, **more)
        engine = make_engine(settings, seed=seed)
    if load:
        engine.load_checkpoint(load)
    if save:
        train(engine, SAVED_AT)
        engine.save_checkpoint(save)  # in the background of the steps that follow
    train(engine, steps)
    assert engine.wait_for_checkpoint()
    return engine.weight_hash()


@pytest.mark.parametrize("how", ["adafactor", "own"])
@pytest.mark.parametrize(
    ("saves", "loads"), [((1, 0), (3, 3)), ((3, 3), (2, 1)), ((2, 2), (1, 0)), ((3, 0), (2, 3))]
)
@pytest.mark.corners(saves=[(3, 3)])
def test_a_checkpoint_goes_on_at_another_world_and_stage_as_if_nothing_had_been(
    worlds: WorldPool, tmp_path: Path, how: str, saves: tuple[int, int], loads: tuple[int, int]
) -> None:
    root = str(tmp_path)
    whole = worlds.run(saves[0], train_to, STEPS, how, saves[1], None, root)
    resumed = worlds.run(loads[0], train_to, STEPS, how, loads[1], root, None)
    assert len({*whole, *resumed}) == 1


def save_twice(stage: int, first: str, second: str) -> None:
    """The second save from what another engine has loaded from the first one."""
    engine = make_engine(config(stage, optimizer=ADAFACTOR))
    train(engine, SAVED_AT)
    engine.save_checkpoint(first)
    other = make_engine(config(stage, optimizer=ADAFACTOR), seed=9)
    other.load_checkpoint(first)
    other.save_checkpoint(second)


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_loaded_is_what_was_saved(worlds: WorldPool, tmp_path: Path, stage: int) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    worlds.run(3, save_twice, stage, str(first), str(second))
    files = [sorted(root.glob("step-*/*.safetensors")) for root in (first, second)]
    assert len(files[0]) == len(files[1]) == 3
    assert [a.read_bytes() == b.read_bytes() for a, b in zip(*files, strict=True)] == [True] * 3


def save_every_step(root: str) -> str:
    engine = with_object(2)
    for step in range(1, STEPS):
        train(engine, step)
        engine.save_checkpoint(root)
    train(engine, STEPS)
    return engine.weight_hash()


def test_every_save_of_a_run_has_the_numbers_of_its_own_step(
    worlds: WorldPool, tmp_path: Path
) -> None:
    whole = worlds.run(2, save_every_step, str(tmp_path))
    resumed = worlds.run(1, train_to, STEPS, "own", 3, str(tmp_path), None)
    assert len({*whole, *resumed}) == 1


def load_as(optimizer: dict[str, Any], root: str, whole: bool) -> int:
    engine = make_engine(config(1, optimizer=optimizer))
    engine.load_checkpoint(root, load_optimizer_states=whole)
    train(engine, SAVED_AT + 1)
    return engine.global_steps


def save_as(optimizer: dict[str, Any], root: str) -> None:
    engine = make_engine(config(1, optimizer=optimizer))
    train(engine, SAVED_AT)
    engine.save_checkpoint(root)


@pytest.mark.parametrize(("saves", "loads"), [("Adafactor", "SGD"), ("AdamW", "Adafactor")])
def test_the_state_of_another_kind_of_optimizer_is_refused_and_the_weights_can_be_had(
    worlds: WorldPool, tmp_path: Path, saves: str, loads: str
) -> None:
    root, optimizer = str(tmp_path), {"type": loads, "params": {"lr": 0.01}}
    worlds.run(2, save_as, {"type": saves}, root)
    with pytest.raises(WorldError, match=f"optimizer {saves} was stepped on .*; give the optimi"):
        worlds.run(2, load_as, optimizer, root, True)
    assert worlds.run(2, load_as, optimizer, root, False) == [SAVED_AT + 1] * 2


class Objects(Kronecker):
    """Keeps what no checkpoint can hold."""

    def step_one(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        self.state[param]["projector"] = object()


def save_objects(root: str) -> list[str]:
    model = nn.Linear(3, 2)
    settings = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 2}
    engine, *_ = zero_deepspeed.initialize(
        model=model, optimizer=Objects(model.parameters()), config=settings
    )
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()
    with pytest.raises(ZeroError) as caught:
        engine.save_checkpoint(root)
    return [str(caught.value)]


def test_state_that_no_checkpoint_can_hold_is_named_on_every_rank(
    worlds: WorldPool, tmp_path: Path
) -> None:
    # The third rank owns nothing, and says the same.
    (told,) = one_result(worlds, save_objects, str(tmp_path), sizes=(3,))
    assert "optimizer state projector of weight is a object, which no checkpoint" in told
