"""`data_types`: parameters have one dtype, buffers may have another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training import config, make_engine, train
from tests.support.world import WorldPool, one_result

STEPS = 3


def buffers_of(settings: dict[str, Any], root: str) -> tuple[list[str], float, str]:
    """The dtypes of parameters and buffers, a buffer's value in a checkpoint, and the hash."""
    engine = make_engine(config(3) | settings)
    train(engine, STEPS)
    engine.save_checkpoint(root)
    other = make_engine(config(1) | settings, seed=8)
    other.load_checkpoint(root)
    assert other.weight_hash() == engine.weight_hash()
    module = other.module
    tensors = (next(module.parameters()), module.temperature, module.scratch)
    return [str(t.dtype) for t in tensors], float(module.temperature[0, 1]), engine.weight_hash()


BF16, FP32 = "torch.bfloat16", "torch.float32"


@pytest.mark.parametrize(
    ("settings", "dtypes"),
    [
        ({"bf16": {"enabled": True}}, [BF16, FP32, FP32]),
        ({"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"}}, [BF16, BF16, BF16]),
        ({"data_types": {"param_dtype": "fp32"}}, [FP32, FP32, FP32]),
        ({"data_types": {"buffer_dtype": "bfloat16"}}, [FP32, BF16, BF16]),
    ],
)
@pytest.mark.corners(dtypes=[[BF16, BF16, BF16]])
def test_buffers_have_the_dtype_that_is_asked_for(
    worlds: WorldPool, tmp_path: Path, settings: dict[str, Any], dtypes: list[str]
) -> None:
    found, value, _ = one_result(worlds, buffers_of, settings, str(tmp_path))
    assert found == dtypes
    rounded = float(torch.tensor(value).bfloat16())
    assert (value == rounded) == (dtypes[1] == BF16)
