"""The engine is an nn.Module around the script's own: what libraries then do with it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import make_model
from tests.support.training import config, fingerprint, make_engine, train
from tests.support.world import WorldPool
from zero_contract.errors import ZeroError


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_parameters_and_modules_are_those_of_the_module(worlds: WorldPool, stage: int) -> None:
    assert worlds.run(1, walk, stage) == [[True] * 6]


def walk(stage: int) -> list[bool]:
    engine = make_engine(config(stage))
    inner = engine.module
    visited: list[nn.Module] = []
    engine.apply(visited.append)
    return [
        isinstance(engine, nn.Module),
        list(engine.modules()) == [engine, *inner.modules()],
        visited[-1] is engine and set(visited[:-1]) == set(inner.modules()),
        dict(engine.named_parameters()).keys()
        == {f"module.{name}" for name, _ in inner.named_parameters()},
        all(a is b for a, b in zip(engine.parameters(), inner.parameters(), strict=True)),
        engine.state_dict().keys() == {f"module.{name}" for name in inner.state_dict()},
    ]


def test_what_it_does_not_have_is_the_modules(worlds: WorldPool) -> None:
    assert worlds.run(1, look_inside) == [[True] * 6]


def look_inside() -> list[bool]:
    engine = make_engine(config(2))
    modes = [engine.training, engine.eval().training, engine.module.training]
    engine.module.train()
    return [
        engine.blocks is engine.module.blocks,
        engine.temperature is engine.module.temperature,
        modes == [True, False, False] and engine.training,
        not hasattr(engine, "nonsense"),
        not hasattr(engine, "__deepcopy__"),
        "neither 'DeepSpeedEngine' nor its module" in problem_of(engine),
    ]


def problem_of(engine: Any) -> str:
    try:
        return str(engine.nonsense)
    except AttributeError as error:
        return str(error)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.corners(stage=[3])
def test_hooks_of_the_engine_see_its_own_calls(worlds: WorldPool, stage: int) -> None:
    hooked, plain = worlds.run(2, train_with_hooks, stage), worlds.run(2, train_plainly, stage)
    for calls, result in hooked:
        assert calls == ["before", "after"] * 3  # 5 micro-batches on 2 ranks
        assert result == plain[0]


def train_with_hooks(stage: int) -> tuple[list[str], Any]:
    engine = make_engine(config(stage))
    calls: list[str] = []
    engine.register_forward_pre_hook(lambda module, _: calls.append("before"))
    engine.register_forward_hook(lambda module, _, loss: calls.append("after"))
    train(engine, 1)
    return calls, fingerprint(engine)


def train_plainly(stage: int) -> Any:
    engine = make_engine(config(stage))
    train(engine, 1)
    return fingerprint(engine)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.corners(stage=[3])
def test_moving_it_where_it_is_changes_no_bit(worlds: WorldPool, stage: int) -> None:
    moved, plain = worlds.run(2, train_after_moving, stage), worlds.run(2, train_plainly, stage)
    assert moved == plain


def train_after_moving(stage: int) -> Any:
    engine = make_engine(config(stage))
    assert engine.to("cpu").float().cpu().to(torch.float32) is engine
    engine.zero_grad(set_to_none=True)
    train(engine, 1)
    return fingerprint(engine)


def test_what_would_take_the_weights_away_is_refused(worlds: WorldPool) -> None:
    [stories] = worlds.run(1, take_weights_away)
    assert [kind for kind, _ in stories] == ["ZeroError"] * 6
    assert "would take module.position away from the engine" in stories[0][1]
    assert "copy engine.module, or call engine.save_checkpoint()" in stories[-1][1]


def take_weights_away() -> list[tuple[str, str]]:
    engine = make_engine(config(2))
    before = fingerprint(engine)
    stories = []
    ways: list[Callable[[], object]] = [
        engine.half,
        lambda: engine.to(torch.bfloat16),
        lambda: engine.to_empty(device="cpu"),
        lambda: copy.copy(engine),
        lambda: copy.deepcopy(engine),
        lambda: pickle.dumps(engine),
    ]
    for way in ways:
        try:
            way()
        except ZeroError as error:
            stories.append((type(error).__name__, str(error)))
    assert str(fingerprint(engine)) == str(before)  # with a NaN, before the first step
    return stories


def test_a_copy_of_the_module_is_a_model_of_its_own(worlds: WorldPool) -> None:
    for same, apart in worlds.run(2, copy_module):
        assert (same, apart) == (True, True)


def copy_module() -> tuple[bool, bool]:
    """As for an average of the weights."""
    engine = make_engine(config(2))
    train(engine, 1)
    before = engine.module_state_dict()
    average = copy.deepcopy(engine.module)
    train(engine, 2)
    kept, now = average.state_dict(), engine.module_state_dict()
    same = all(torch.equal(kept[name], before[name]) for name in before)
    return same, not all(torch.equal(now[name], before[name]) for name in before)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.corners(stage=[3])
def test_weights_that_are_loaded_are_those_that_are_trained(worlds: WorldPool, stage: int) -> None:
    loaded, made = worlds.run(2, train_loaded, stage), worlds.run(2, train_made, stage)
    assert loaded == made


def train_loaded(stage: int) -> Any:
    engine = make_engine(config(stage), seed=7)
    engine.load_state_dict({f"module.{n}": v for n, v in make_model(8).state_dict().items()})
    train(engine, 2)
    return fingerprint(engine)


def train_made(stage: int) -> Any:
    engine = make_engine(config(stage), seed=8)
    train(engine, 2)
    return fingerprint(engine)


@pytest.mark.parametrize("stage", [1, 3])
def test_in_16_bits_they_reach_the_master_weights(worlds: WorldPool, stage: int) -> None:
    assert worlds.run(2, load_in_16_bits, stage) == [[True, True]] * 2


def load_in_16_bits(stage: int) -> list[bool]:
    engine = make_engine(config(stage, bf16=True))
    other = make_model(8).bfloat16().state_dict()
    engine.load_state_dict({f"module.{name}": value for name, value in other.items()}, assign=True)
    loaded, master = engine.module_state_dict(), engine.get_fp32_state_dict()
    return [
        all(torch.equal(loaded[name], value) for name, value in other.items()),
        all(torch.equal(master[name].bfloat16(), value) for name, value in other.items()),
    ]


def test_weights_of_another_model_are_not_loaded(worlds: WorldPool) -> None:
    [(message, unchanged, missing)] = worlds.run(1, load_wrong_names)
    assert 'Unexpected key(s) in state_dict: "position"' in message
    assert unchanged
    assert "module.position" in missing


def load_wrong_names() -> tuple[str, bool, list[str]]:
    """Those of the module, without the engine's prefix."""
    engine, names = make_engine(config(3)), make_model(8).state_dict()
    before = engine.weight_hash()
    with pytest.raises(RuntimeError) as caught:
        engine.load_state_dict(names)
    missing = engine.load_state_dict(names, strict=False).missing_keys
    return str(caught.value), engine.weight_hash() == before, missing


@pytest.mark.full
@pytest.mark.parametrize("stage", [2, 3])
def test_compiled_it_trains_to_the_same_bits(worlds: WorldPool, stage: int) -> None:
    compiled, plain = worlds.run(2, train_compiled, stage), worlds.run(2, train_plainly, stage)
    assert compiled == plain


def train_compiled(stage: int) -> Any:
    torch._dynamo.reset()  # a graph of the model at another stage is not one for this stage
    engine = make_engine(config(stage))
    engine.compile(backend="eager", compile_kwargs={"dynamic": False})
    train(engine, 1)
    return fingerprint(engine)
