"""The module's own state_dict and load_state_dict, which scripts call without asking the engine."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.support.models import make_model
from tests.support.training import DIVIDED, config, make_engine, train
from tests.support.world import WorldError, WorldPool
from zero_deepspeed.zero import GatheredParameters


def test_at_stage_3_it_has_empty_tensors_and_says_so_once(worlds: WorldPool) -> None:
    [(lines, sizes, of_a_part)] = worlds.run(1, own_state_dicts)
    assert len(lines) == 1
    assert "call engine.module_state_dict() or engine.save_16bit_model()" in lines[0]
    assert sizes == of_a_part == {0}


def own_state_dicts() -> tuple[list[str], set[int], set[int]]:
    engine = make_engine(config(3, zero_optimization=DIVIDED))
    train(engine, 1)
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zero_engine.sharding.module_state").addHandler(handler)
    whole, part = engine.module.state_dict(), engine.module.blocks[0].state_dict()
    sizes = [
        {state[name].numel() for name, _ in module.named_parameters()}
        for module, state in ((engine.module, whole), (engine.module.blocks[0], part))
    ]
    return lines, sizes[0], sizes[1]


def test_what_is_gathered_is_copied_and_outlives_the_gathering(worlds: WorldPool) -> None:
    assert worlds.run(2, gathered_state_dict) == [True, True]


def gathered_state_dict() -> bool:
    engine = make_engine(config(3, zero_optimization=DIVIDED))
    train(engine, 2)
    several = [*engine.module.parameters(), None]  # as transformers lists a bias that is not there
    with GatheredParameters(several):
        found = engine.module.state_dict()
    whole = engine.module_state_dict()
    return found.keys() == whole.keys() and all(torch.equal(found[n], whole[n]) for n in whole)


@pytest.mark.parametrize("modifier", [None, 0])
def test_a_tensor_that_a_script_keeps_without_a_copy_outlives_the_gathering(
    worlds: WorldPool, modifier: int | None
) -> None:
    assert worlds.run(2, keep_gathered, modifier) == [True, True]


def keep_gathered(modifier: int | None) -> bool:
    """DeepSpeed-Chat keeps `.cpu()`, which is no copy on a CPU."""
    engine = make_engine(config(3, zero_optimization=DIVIDED))
    train(engine, 1)
    kept = {}
    for name, param in engine.module.named_parameters():
        with GatheredParameters([param], modifier_rank=modifier):
            kept[name] = param.data.cpu()
    whole = engine.module_state_dict()
    same = all(torch.equal(value, whole[name]) for name, value in kept.items())
    train(engine, 2)
    return same and all(torch.equal(value, whole[name]) for name, value in kept.items())


@pytest.mark.parametrize("part", [False, True])
def test_weights_that_are_divided_are_not_written_over(worlds: WorldPool, part: bool) -> None:
    message = r"load_state_dict\(\) at stage 3: .* is divided; load the weights before initialize"
    with pytest.raises(WorldError, match=message):
        worlds.run(1, load_into, part)


def load_into(part: bool) -> None:
    engine, plain = make_engine(config(3, zero_optimization=DIVIDED)), make_model()
    modules: Any = (engine.module, plain)
    target, source = (module.blocks[0] if part else module for module in modules)
    target.load_state_dict(source.state_dict())


def test_inside_gathered_parameters_weights_are_loaded(worlds: WorldPool) -> None:
    assert worlds.run(2, load_gathered) == [True, True]


def load_gathered() -> bool:
    engine, other = (
        make_engine(config(3, zero_optimization=DIVIDED)),
        make_model(seed=9).state_dict(),
    )
    with GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        if engine.global_rank == 0:
            engine.module.load_state_dict(other)
    whole = engine.module_state_dict()
    return all(torch.equal(whole[n], other[n]) for n, _ in engine.module.named_parameters())
