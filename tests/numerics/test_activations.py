"""The config's activation_checkpointing changes no bit, and DeepSpeed's function follows it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.training import config, make_engine, train
from tests.support.world import WorldPool, one_result
from zero_deepspeed import checkpointing

KEYS: dict[str, dict[str, Any]] = {
    "recompute": {"modules": ["Block"]},
    "recompute to host": {"modules": ["Block"], "cpu_checkpointing": True},
    "selective": {"modules": ["Block"], "policy": "selective"},
    "selective to host": {"modules": ["Block"], "policy": "selective", "cpu_checkpointing": True},
    "offload": {"modules": ["*"], "policy": "offload"},
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.corners(stage=[3], bf16=[False])
def test_no_policy_changes_a_bit_at_any_stage_and_world_size(
    worlds: WorldPool, stage: int, bf16: bool
) -> None:
    (plain,) = worlds.run(1, train_kept, stage, bf16, {})
    for keys in KEYS.values():
        assert one_result(worlds, train_kept, stage, bf16, keys, sizes=(2,)) == plain


def train_kept(stage: int, bf16: bool, keys: dict[str, Any]) -> tuple[str, float]:
    engine = make_engine(config(stage, bf16=bf16, activation_checkpointing=keys))
    train(engine, 1)
    return engine.weight_hash(), engine.mean_loss


def test_a_block_runs_once_more_in_backward(worlds: WorldPool) -> None:
    assert worlds.run(1, count_forwards) == [{"": 5, "recompute": 10, "offload": 5}]


def count_forwards() -> dict[str, int]:
    counts = {}
    for name in ("", "recompute", "offload"):
        calls: list[None] = []
        engine = make_engine(config(2, activation_checkpointing=KEYS.get(name, {})))
        engine.module.blocks[0].up.register_forward_hook(lambda *_, calls=calls: calls.append(None))
        train(engine, 1)
        counts[name] = len(calls)
    return counts


def test_deepspeeds_function_takes_the_settings_of_the_config(worlds: WorldPool) -> None:
    assert worlds.run(1, configure) == [[False, True, True, False]]


def configure() -> list[bool]:
    """Whether it keeps inputs in host memory: as configured, and after an engine was made."""
    found = []
    checkpointing.configure(None, {"activation_checkpointing": {"cpu_checkpointing": False}})
    found.append(checkpointing._State.settings)
    checkpointing.configure(None, partition_activations=True, checkpoint_in_cpu=True)
    found.append(checkpointing._State.settings)
    make_engine(config(0))  # without the section
    found.append(checkpointing._State.settings)
    make_engine(config(0, activation_checkpointing={"cpu_checkpointing": False}))
    found.append(checkpointing._State.settings)
    return [bool(each and each.cpu_checkpointing) for each in found]
