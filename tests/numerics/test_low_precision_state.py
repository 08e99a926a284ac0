"""Master weights and moments that rest in 16 bits: one result everywhere, checkpoints of either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zero_deepspeed
from tests.numerics.test_offload import offloading
from tests.support.models import Tokens, make_model, param_groups
from tests.support.saving import heard
from tests.support.training import DATASET_SIZE, config, fingerprint, make_engine, train
from tests.support.world import WorldPool, one_result
from zero_checkpoint import find
from zero_checkpoint.files.place import place
from zero_contract.errors import ConfigError
from zero_deepspeed.utils import safe_get_full_optimizer_state
from zero_deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from zero_engine.config import load_config
from zero_engine.core.engine import Engine
from zero_engine.sharding.segments import elementwise_keys

STEPS = 4
MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True}
KINDS: dict[str, dict[str, Any]] = {
    "wide": {"bf16": {"enabled": True}},
    "bf16 masters": {"bf16": MASTERS},
    "all bf16": {"bf16": {**MASTERS, "bf16_optimizer_states": True}},
    "fp16 masters": {
        "fp16": {"enabled": True, "fp16_master_weights_and_grads": True, "loss_scale": 256},
        "bf16": {"enabled": False},
    },
}
PLACES = [
    (1, "none"),
    (2, "none"),
    (3, "none"),
    (1, "cpu"),
    (2, "nvme"),
    (3, "nvme+nvme"),
    (3, "cpu+nvme"),
]
FEW = [(1, "cpu"), (2, "nvme"), (3, "none"), (3, "nvme+nvme")]
"""Each stage, and each tier of master weights."""


def make(kind: str, stage: int = 2, where: str = "none", path: str = "", **more: Any) -> Engine:
    settings = offloading(stage, where, path) | KINDS[kind]
    return make_engine(settings, **more)


def train_everywhere(kind: str, places: list[tuple[int, str]], path: str) -> list[tuple[Any, ...]]:
    found = []
    for stage, where in places:
        engine = make(kind, stage, where, path)
        losses = train(engine, STEPS)
        assert engine.skipped_steps == 0
        found.append((*fingerprint(engine), tuple(losses), rests_in(engine)))
    return found


def rests_in(engine: Engine) -> tuple[str, ...]:
    """The dtypes of master weights, moments and gradient sums."""
    zero = engine._core.zero
    assert zero is not None
    state = zero.optimizer.state
    found = {
        *(("master", unit.shard.dtype) for unit in zero.units),
        *(("sums", total.dtype) for total in zero.totals),
        *(
            ("moments", state[s.param][key].dtype)
            for s in zero.segments
            for key in elementwise_keys(s, state[s.param])
        ),
    }
    return tuple(sorted(f"{what} {str(dtype).removeprefix('torch.')}" for what, dtype in found))


DTYPES = {
    "wide": ("master float32", "moments float32", "sums float32"),
    "bf16 masters": ("master bfloat16", "moments float32", "sums float32"),
    "all bf16": ("master bfloat16", "moments bfloat16", "sums float32"),
    "fp16 masters": ("master float16", "moments float32", "sums float32"),
}


@pytest.mark.parametrize("kind", ["bf16 masters", "all bf16", "fp16 masters"])
@pytest.mark.parametrize("places", [FEW, PLACES], ids=["few", "all"])
@pytest.mark.corners(kind=["bf16 masters"], places=[FEW])
def test_every_stage_world_size_and_tier_gives_the_same_bits(
    worlds: WorldPool, tmp_path: Path, kind: str, places: list[tuple[int, str]]
) -> None:
    found = one_result(worlds, train_everywhere, kind, places, str(tmp_path))
    assert found == [found[0]] * len(places)
    assert found[0][-1] == DTYPES[kind]


@pytest.mark.full
@pytest.mark.parametrize("name", ["Lamb", "Muon", "SGD"])
def test_every_kind_of_optimizer_steps_it(worlds: WorldPool, tmp_path: Path, name: str) -> None:
    optimizer = {"type": name, "params": {"lr": 1e-2}}
    found = one_result(worlds, hashes_with, optimizer, str(tmp_path))
    assert len(set(found)) == 1


def hashes_with(optimizer: dict[str, Any], path: str) -> list[str]:
    hashes = []
    for stage, where in ((1, "none"), (3, "nvme")):
        engine = make_engine(
            offloading(stage, where, path, optimizer=optimizer) | KINDS["all bf16"]
        )
        train(engine, STEPS)
        hashes.append(engine.weight_hash())
    return hashes


def test_a_step_is_that_of_fp32_rounded(worlds: WorldPool) -> None:
    """All begin with the weights as forward sees them; afterwards the two go apart."""
    wide, low_precision, all_low_precision = worlds.run(1, step_once)[0]
    assert wide.keys() == low_precision.keys()
    for name, value in wide.items():
        assert torch.equal(value.bfloat16().float(), low_precision[name]), name
        assert torch.equal(low_precision[name], all_low_precision[name]), name


def step_once() -> list[dict[str, torch.Tensor]]:
    states = []
    for kind in ("wide", "bf16 masters", "all bf16"):
        model = make_model()
        engine, *_ = zero_deepspeed.initialize(
            model=model,
            model_parameters=param_groups(model),
            training_data=Tokens(DATASET_SIZE),
            config=offloading(2, "none", "") | KINDS[kind],
        )
        train(engine, 1)
        state = engine.get_fp32_state_dict()
        states.append({name: state[name] for name, _ in model.named_parameters()})
    return states


# ---- checkpoints ----

Moments = dict[str, np.ndarray]


def save(kind: str, stage: int, root: str) -> tuple[str, Moments]:
    """The hash at the end, and the moments at the checkpoint before."""
    engine = make(kind, stage)
    train(engine, 2)
    engine.save_checkpoint(root)
    saved = moments(engine)
    train(engine, STEPS)
    return engine.weight_hash(), saved


def moments(engine: Engine) -> Moments:
    found = {}
    for name, param in engine.module.named_parameters():
        value = safe_get_full_optimizer_state(param, "exp_avg") if param.requires_grad else None
        if value is not None:
            found[name] = value.float().numpy()
    return found


def go_on(kind: str, stage: int, root: str) -> str:
    engine = make(kind, stage, seed=8)
    engine.load_checkpoint(root)
    train(engine, STEPS)
    return engine.weight_hash()


@pytest.mark.parametrize("kind", ["bf16 masters", "all bf16", "fp16 masters"])
@pytest.mark.corners(kind=["all bf16"])
def test_a_run_goes_on_at_another_world_size_and_stage_with_the_same_bits(
    worlds: WorldPool, tmp_path: Path, kind: str
) -> None:
    ends = worlds.run(2, save, kind, 3, str(tmp_path))
    assert worlds.run(3, go_on, kind, 1, str(tmp_path)) == [ends[0][0]] * 3
    (candidate,) = find(place(tmp_path)).candidates
    dtypes = {(t.kind, info.dtype) for t, info in candidate.manifest.tensors.items()}
    half = torch.float16 if kind == "fp16 masters" else torch.bfloat16
    moment = torch.bfloat16 if kind == "all bf16" else torch.float32
    assert dtypes == {
        ("param", half),
        ("buffer", torch.float32),
        ("exp_avg", moment),
        ("exp_avg_sq", moment),
    }


@pytest.mark.parametrize(
    ("there", "here", "rounded"),
    [
        ("all bf16", "wide", []),
        ("wide", "all bf16", ["weights or optimizer state in float32 are rounded to bfloat16"]),
        ("wide", "bf16 masters", ["weights or optimizer state in float32 are rounded to bfloat16"]),
    ],
)
def test_a_checkpoint_loads_into_the_other_precision_and_says_so_where_it_rounds(
    worlds: WorldPool, tmp_path: Path, there: str, here: str, rounded: list[str]
) -> None:
    saved = worlds.run(2, save, there, 3, str(tmp_path))[0][1]
    weights = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    ((lines, state, loaded, dtypes), *_) = worlds.run(3, load, here, str(tmp_path))
    assert [line for line in lines if "rounded" in line] == rounded
    low_precision = here != "wide"
    for name, value in state.items():
        is_buffer = name == "temperature"
        expected = as_rests(weights[name], low_precision and not is_buffer)
        assert np.array_equal(value, expected), name
    for name, value in loaded.items():
        expected = as_rests(torch.from_numpy(saved[name]), here == "all bf16")
        assert np.array_equal(value, expected), name
    assert dtypes == DTYPES[here]


def as_rests(value: torch.Tensor, low_precision: bool) -> np.ndarray:
    return (value.bfloat16().float() if low_precision else value).numpy()


def load(kind: str, root: str) -> tuple[list[str], Moments, Moments, tuple[str, ...]]:
    """What is logged, the weights and the moments, and what they rest in; training goes on."""
    with heard() as lines:
        engine = make(kind, 1, seed=8)
        engine.load_checkpoint(root)
    weights = {name: value.numpy() for name, value in engine.get_fp32_state_dict().items()}
    loaded, dtypes = moments(engine), rests_in(engine)
    train(engine, STEPS)
    assert rests_in(engine) == dtypes
    return lines, weights, loaded, dtypes


# ---- what does not go together ----


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (config(0) | KINDS["bf16 masters"], "not at stage 0; set zero_optimization.stage to 1"),
        (config(0) | KINDS["fp16 masters"], "not at stage 0; set zero_optimization.stage to 1"),
        (
            config(1) | {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
            "needs bf16.bf16_master_weights_and_grads; set that to true as well",
        ),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_made(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(settings)
