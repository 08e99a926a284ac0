"""Every class of torch.optim: plain torch's bits, at every stage and world, in every tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zero_deepspeed
from tests.support.models import make_model, param_groups
from tests.support.plain import plain_torch
from tests.support.torch_optimizers import OPTIONS, classes
from tests.support.training import config, make_engine, train
from tests.support.world import WorldError, WorldPool
from zero_engine.core.engine import Engine

STEPS, SAVED_AT = 3, 2
"""To the end of the first epoch, whose last step is short."""
STAGES = {1: (0,), 2: (1, 3), 3: (2, 3)}
"""World size -> the stages that are trained there."""

CASES = [(name, options) for name, cases in OPTIONS.items() for options in cases]
REFUSED = {
    "LBFGS": "LBFGS calls the model again within a step, and sees all parameters as one vector; us",
    "SparseAdam": "SparseAdam takes sparse gradients, and those here are dense; use Adam or AdamW",
}


def test_every_class_of_torch_is_accounted_for() -> None:
    in_test_muon = {"Muon"}
    assert classes() == OPTIONS.keys() | REFUSED.keys() | in_test_muon


def with_object(
    stage: int,
    name: str,
    options: dict[str, Any],
    *,
    seed: int = 7,
    whole: bool | None = None,
    **zero: Any,
) -> Engine:
    """An engine with an optimizer object of the script."""
    settings = config(stage, gradient_clipping=0)
    settings["zero_optimization"] |= zero
    del settings["optimizer"]
    model = make_model(seed)
    made = getattr(torch.optim, name)(param_groups(model), **options)
    made.needs_whole_parameters = whole
    engine = make_engine(settings, model=model, optimizer=made, model_parameters=None)
    assert engine.optimizer is made
    return engine


def states(name: str, options: dict[str, Any], stages: tuple[int, ...]) -> list[dict[str, Any]]:
    """The weights after training with an object, and with what the config makes."""
    engines = [with_object(stage, name, options) for stage in stages]
    named = {"Adam": {"adam_w_mode": False}, "AdamW": {"weight_decay": 1e-2}}.get(name, {})
    optimizer = {"type": name, "params": named | options}
    engines.append(make_engine(config(stages[-1], gradient_clipping=0, optimizer=optimizer)))
    for engine in engines:
        train(engine, STEPS)
    return [
        {key: value.numpy() for key, value in engine.module_state_dict().items()}
        for engine in engines
    ]


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.corners(name=["Adafactor"], options=OPTIONS["Adafactor"][-1:])
def test_by_object_and_by_name_it_is_plain_torch_at_every_stage_and_world(
    worlds: WorldPool, name: str, options: dict[str, Any]
) -> None:
    plain = plain_torch(STEPS, name, options)
    for world, stages in STAGES.items():
        for found in worlds.run(world, states, name, options, stages):
            for state in found:
                assert [key for key in plain if not np.array_equal(state[key], plain[key])] == []


FUSED: list[tuple[str, dict[str, Any]]] = [
    ("Adagrad", {"fused": True}),
    ("AdamW", {"fused": True, "amsgrad": True}),
    ("SGD", {"fused": True, "momentum": 0.9}),
]


def fused_on_wholes(stage: int, name: str, options: dict[str, Any]) -> dict[str, Any]:
    engine = with_object(stage, name, options, whole=True)
    train(engine, STEPS)
    return {key: value.numpy() for key, value in engine.module_state_dict().items()}


@pytest.mark.parametrize(("name", "options"), FUSED)
@pytest.mark.corners(name=["AdamW"])
def test_on_whole_parameters_fused_kernels_are_plain_torchs_as_well(
    worlds: WorldPool, name: str, options: dict[str, Any]
) -> None:
    plain = plain_torch(STEPS, name, options)
    for state in worlds.run(3, fused_on_wholes, 3, name, options):
        assert [key for key in plain if not np.array_equal(state[key], plain[key])] == []


def train_bf16(name: str, options: dict[str, Any], stages: tuple[int, ...]) -> list[str]:
    hashes = []
    for stage in stages:
        optimizer = {"type": name, "params": options}
        engine = make_engine(config(stage, bf16=True, optimizer=optimizer))
        train(engine, STEPS)
        hashes.append(engine.weight_hash())
    return hashes


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.corners(name=["AdamW"])
def test_in_bf16_there_is_one_result_at_every_stage_and_world(worlds: WorldPool, name: str) -> None:
    job = (name, OPTIONS[name][-1])
    ranks = [
        r for world, stages in STAGES.items() for r in worlds.run(world, train_bf16, *job, stages)
    ]
    assert len({digest for rank in ranks for digest in rank}) == 1


# ---- tiers and checkpoints ----


def train_to(
    steps: int, stage: int, name: str, load: str | None, save: str | None, **zero: Any
) -> str:
    engine = with_object(stage, name, OPTIONS[name][-1], seed=9 if load else 7, **zero)
    if load:
        engine.load_checkpoint(load)
    train(engine, steps)
    if save:
        engine.save_checkpoint(save)
    return engine.weight_hash()


def save_and_offload(name: str, root: str, scratch: str) -> list[str]:
    """Hashes after a save at stage 2, which goes on; and after training in tiers of stage 3."""
    hashes = [train_to(SAVED_AT, 2, name, None, root)]
    if name == "Adafactor":
        return hashes
    tiers = {"device": "cpu"}, {"device": "nvme", "nvme_path": scratch}
    return hashes + [train_to(STEPS, 3, name, None, None, offload_optimizer=t) for t in tiers]


def load(name: str, root: str, stages: tuple[int, ...]) -> list[str]:
    return [train_to(STEPS, stage, name, root, None) for stage in stages]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.corners(name=["AdamW"])
def test_from_a_checkpoint_it_goes_on_at_another_world_and_stage_and_in_every_tier(
    worlds: WorldPool, tmp_path: Path, name: str
) -> None:
    root, scratch = str(tmp_path / "root"), tmp_path / "scratch"
    scratch.mkdir()
    whole = set(worlds.run(1, train_to, STEPS, 0, name, None, None))
    saved = worlds.run(2, save_and_offload, name, root, str(scratch))
    assert {digest for rank in saved for digest in rank[1:]} <= whole
    for world in (1, 3):
        resumed = worlds.run(world, load, name, root, STAGES[world])
        assert {digest for rank in resumed for digest in rank} == whole


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_with_the_reason_by_name_and_as_an_object(
    worlds: WorldPool, name: str
) -> None:
    for how in (by_name, by_object):
        with pytest.raises(WorldError, match=REFUSED[name]):
            worlds.run(1, how, name)


def by_name(name: str) -> None:
    make_engine(config(1, optimizer={"type": name}))


def by_object(name: str) -> None:
    model = make_model()
    settings = config(1)
    del settings["optimizer"]
    made = getattr(torch.optim, name)(list(model.parameters()))
    zero_deepspeed.initialize(model=model, optimizer=made, config=settings)
