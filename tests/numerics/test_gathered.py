"""What a script sees of parameters that come and go at stage 3; which ranks may convert."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.models import make_model
from tests.support.training import config, make_engine, train
from tests.support.world import WorldError, WorldPool
from zero_deepspeed.utils import safe_set_full_fp32_param
from zero_deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
from zero_deepspeed.zero import GatheredParameters, Init, ZeroParamStatus

AVAILABLE, NOT_AVAILABLE = ZeroParamStatus.AVAILABLE, ZeroParamStatus.NOT_AVAILABLE


def statuses(_: None) -> list[Any]:
    engine = make_engine(config(3))
    block = engine.module.blocks[0]
    seen: list[Any] = []

    def look(*_: Any) -> None:
        seen.append({param.ds_status for param in block.parameters()})

    look()
    block.up.register_forward_hook(look)
    output = engine(next(iter(engine.training_dataloader)))
    look()
    block.up.weight.register_hook(lambda gradient: look())
    engine.backward(output)
    look()
    with GatheredParameters(list(block.parameters())):
        look()
    look()
    return seen


def test_the_status_of_a_parameter_is_that_of_now(worlds: WorldPool) -> None:
    there, away = {AVAILABLE}, {NOT_AVAILABLE}
    assert worlds.run(2, statuses, None) == [[away, there, away, there, away, there, away]] * 2


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def fill(param: torch.nn.Parameter) -> None:
    with torch.no_grad():
        param.fill_(3.0)


def fill_data(param: torch.nn.Parameter) -> None:
    param.data.fill_(3.0)


def read(param: torch.nn.Parameter) -> None:
    assert bool(param.isfinite().all())


def write_without_modifier(early: bool) -> list[tuple[bool, bool]]:
    told = Told()
    logging.getLogger("zero_engine").addHandler(told)
    if early:
        with Init():
            module: torch.nn.Module = make_model(7)
    else:
        module = make_engine(config(3)).module
    found = []
    for way in (read, fill) if early else (read, fill, fill_data):
        told.messages.clear()
        param = module.blocks[len(found) % 2].up.weight
        with GatheredParameters([param]):
            way(param)
        with GatheredParameters([param]):
            kept = bool((param == 3).any())
        found.append((kept, any("the writes are dropped" in each for each in told.messages)))
        from zero_engine.parameters import gather

        gather._told.clear()
    logging.getLogger("zero_engine").removeHandler(told)
    return found


@pytest.mark.parametrize("early", [False, True], ids=["of an engine", "before it"])
def test_a_write_without_a_modifier_rank_is_told_of(worlds: WorldPool, early: bool) -> None:
    (found,) = worlds.run(1, write_without_modifier, early)
    assert found == [(False, False), (False, True), (False, True)][: len(found)]


@pytest.mark.parametrize("how", ["set", "load", "step"])
def test_what_the_engine_writes_while_a_modifier_is_at_work_stays(
    worlds: WorldPool, how: str, tmp_path: Path
) -> None:
    for outside, inside in worlds.run(2, write_in_context, how, str(tmp_path)):
        assert inside == outside


def write_in_context(how: str, directory: str) -> list[str]:
    found = []
    for gathers in (False, True):
        engine = make_engine(config(3))
        train(engine, 1)
        engine.save_checkpoint(f"{directory}/{gathers}")
        weight = engine.module.blocks[0].up.weight
        with GatheredParameters([weight], modifier_rank=0, enabled=gathers):
            if how == "set":
                safe_set_full_fp32_param(weight, torch.full(weight.ds_shape, 0.25))
            elif how == "load":
                engine.load_checkpoint(f"{directory}/{gathers}")
            else:
                train(engine, 2)
        found.append(engine.weight_hash())
    return found


def made(how: dict[str, Any]) -> tuple[str, list[float]]:
    with Init(**how):
        module = torch.nn.Linear(1, 2)
        module.bias.data.fill_(1 / 3)
    with GatheredParameters(module.bias):
        return str(module.bias.dtype), module.bias.tolist()


BF16 = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
DTYPES: list[tuple[dict[str, Any], torch.dtype]] = [
    ({}, torch.float32),
    ({"dtype": torch.float16}, torch.float16),
    ({"config": BF16}, torch.bfloat16),
    ({"config": BF16 | {"zero_optimization": {"stage": 2}}}, torch.float32),
]


@pytest.mark.parametrize(("how", "dtype"), DTYPES)
@pytest.mark.corners(dtype=[torch.bfloat16])
def test_init_leaves_parameters_in_the_dtype_of_the_config(
    worlds: WorldPool, how: dict[str, Any], dtype: torch.dtype
) -> None:
    third = torch.tensor(1 / 3, dtype=dtype).item()
    assert worlds.run(1, made, how) == [(str(dtype), [third] * 2)]


def convert(root: str, on: tuple[int, ...], safe: bool) -> list[str]:
    engine = make_engine(config(3))
    train(engine, 1)
    engine.save_checkpoint(root)
    if dist.get_rank() not in on:
        return []
    files = convert_zero_checkpoint_to_fp32_state_dict(root, f"{root}/out", safe_serialization=safe)
    return [str(file.relative_to(root)) for file in files if file.stat().st_size]


@pytest.mark.parametrize("safe", [False, True], ids=["torch", "safetensors"])
@pytest.mark.parametrize("on", [(0, 1), (1,)], ids=["all ranks", "one rank"])
@pytest.mark.corners(safe=[False])
def test_all_ranks_or_one_convert_a_checkpoint(
    worlds: WorldPool, tmp_path: Path, on: tuple[int, ...], safe: bool
) -> None:
    found = worlds.run(2, convert, str(tmp_path), on, safe)
    assert found[1]
    assert all(files == found[1] for files in found if files)
    assert [bool(files) for files in found] == [rank in on for rank in range(2)]


def convert_twice(root: str) -> None:
    convert(root, (0, 1), False)
    convert_zero_checkpoint_to_fp32_state_dict(root, f"{root}/out")


def test_an_error_of_the_rank_that_writes_is_that_of_all(worlds: WorldPool, tmp_path: Path) -> None:
    with pytest.raises(WorldError, match=r"(?s)is there already.*is there already"):
        worlds.run(2, convert_twice, str(tmp_path))
