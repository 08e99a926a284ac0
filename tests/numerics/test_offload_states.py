"""offload_states and reload_states: the bytes leave, come back, and training does not notice."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_deepspeed
from tests.numerics.peak_memory import resident
from tests.numerics.test_offload import offloading
from tests.support.training import DIVIDED, config, fingerprint, make_engine, train
from tests.support.world import WorldError, WorldPool
from zero_contract.errors import ZeroError
from zero_deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from zero_deepspeed.utils import safe_get_full_fp32_param
from zero_deepspeed.zero import GatheredParameters
from zero_engine.core.engine import Engine

STEPS = 4
INCLUDES: list[Any] = [None, ["optim_states"], [OffloadStateTypeEnum.hp_params, "lp_params"]]


def bytes_here(engine: Engine) -> int:
    """Of all storages that can be moved."""
    moved = engine._core.moved
    here = [moved._storage(t) for kind in OffloadStateTypeEnum for t in moved.tensors_of(kind)]
    return sum({storage._cdata: storage.nbytes() for storage in here}.values())


def train_and_move(stage: int, bf16: bool, moves: bool) -> tuple[Any, ...]:
    engine = make_engine(config(stage, bf16=bf16))
    losses = []
    for step in range(1, STEPS + 1):
        losses += train(engine, step)
        if moves:
            before = bytes_here(engine)
            engine.offload_states(INCLUDES[step % 3], device=OffloadDeviceEnum.cpu)
            engine.offload_states(INCLUDES[(step + 1) % 3])
            assert bytes_here(engine) < before
            engine.reload_states()
            assert bytes_here(engine) == before
    return (*fingerprint(engine), losses)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.corners(stage=[0, 3], bf16=[True])
def test_training_goes_on_as_if_nothing_had_been_moved(
    worlds: WorldPool, stage: int, bf16: bool
) -> None:
    moved = worlds.run(2, train_and_move, stage, bf16, True)
    assert moved == worlds.run(2, train_and_move, stage, bf16, False)


def look_at_weights(stage: int, root: str, looks: bool) -> tuple[Any, ...]:
    engine = make_engine(config(stage))
    for step in range(1, STEPS + 1):
        train(engine, step)
        if looks:
            with GatheredParameters(list(engine.module.parameters())):
                seen = [param.detach().numpy() for param in engine.module.parameters()]
                before = [array.copy() for array in seen]
            engine.save_checkpoint(root)
            engine.offload_states()
            engine.reload_states()
            assert all((a == b).all() for a, b in zip(seen, before, strict=True))
    return fingerprint(engine)


@pytest.mark.parametrize("stage", [0, 3])
def test_numpy_may_look_at_weights_and_a_save_at_states_that_are_freed_afterwards(
    worlds: WorldPool, tmp_path: Path, stage: int
) -> None:
    looked = worlds.run(2, look_at_weights, stage, str(tmp_path), True)
    assert looked == worlds.run(2, look_at_weights, stage, str(tmp_path), False)


def read_while_away(stage: int, bf16: bool, include: Any) -> tuple[list[bool], ...]:
    """Of each parameter: whether it is NaN before, meanwhile and afterwards."""
    engine = make_engine(config(stage, bf16=bf16, zero_optimization=DIVIDED | {"stage": stage}))
    train(engine, 1)

    def look() -> list[bool]:
        return [bool(param.isnan().all()) for param in engine.module.parameters()]

    before = look()
    engine.offload_states(include)
    meanwhile = look()
    engine.reload_states()
    return before, meanwhile, look()


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    ("bf16", "include", "away"),
    [
        (True, None, {True}),
        (True, ["optim_states"], {False}),
        # In fp32 the master weights are those that the model computes with; frozen ones have none.
        (False, ["hp_params"], {True, False}),
    ],
)
def test_parameters_that_are_away_show_nan_until_they_are_back(
    worlds: WorldPool, stage: int, bf16: bool, include: Any, away: set[bool]
) -> None:
    before, meanwhile, after = worlds.run(1, read_while_away, stage, bf16, include)[0]
    divided = stage == 3
    assert set(before) == set(after) == {divided}
    assert set(meanwhile) == ({True} if divided else away)


def read_the_optimizer_while_away(stage: int) -> tuple[Any, ...]:
    engine = make_engine(config(stage, bf16=True))
    train(engine, 2)

    def look() -> list[list[float]]:
        group = [p for group in engine.optimizer.param_groups for p in group["params"]]
        state = [v for s in engine.optimizer.state_dict()["state"].values() for v in s.values()]
        return [tensor.double().flatten().tolist() for tensor in (*group, *state)]

    before = look()
    engine.offload_states(["optim_states"])
    engine.offload_states()
    meanwhile = look()
    engine.reload_states()
    return before, meanwhile, look()


def read_kept_views(stage: int) -> list[tuple[bool, bool]]:
    """Of each view that a script keeps: whether it is NaN while its storage is away, and right
    again afterwards."""
    engine = make_engine(config(stage, bf16=True))
    train(engine, 1)
    shown = [param for group in engine.optimizer.param_groups for param in group["params"]]
    for state in engine.optimizer.state.values():
        shown += [value for value in state.values() if value.numel() > 1]
    shown += engine.module.parameters() if stage < 3 else []
    kept = [tensor.detach() for tensor in shown]
    before = [view.clone() for view in kept]
    engine.offload_states()
    meanwhile = [bool(view.isnan().all()) for view in kept]
    engine.reload_states()
    return [
        (nan, torch.equal(view, was))
        for nan, view, was in zip(meanwhile, kept, before, strict=True)
    ]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.corners(stage=[0, 3])
def test_a_view_that_a_script_has_kept_shows_nan_while_what_it_shows_is_away(
    worlds: WorldPool, stage: int
) -> None:
    """On a CPU it read address 0, which ends the process."""
    assert set(worlds.run(1, read_kept_views, stage)[0]) == {(True, True)}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.corners(stage=[0, 3])
def test_the_optimizers_tensors_can_be_read_while_they_are_away(
    worlds: WorldPool, stage: int
) -> None:
    for before, meanwhile, after in worlds.run(2, read_the_optimizer_while_away, stage):
        assert before == meanwhile == after
        assert any(any(values) for values in before)


LARGE = (4096, 4096)
WEIGHTS = ["lp_params", "hp_params"]


@contextmanager
def no_memory() -> Iterator[None]:
    """A context in which this process cannot allocate the weights of the large layer."""
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (resident("VmData") + (16 << 20), limits[1]))
    taken: list[torch.Tensor] = []
    try:
        with suppress(RuntimeError):  # malloc may have kept as much of what was freed
            while True:
                taken.append(torch.empty(LARGE))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


def move_without_memory(stage: int, which: str) -> tuple[bool, bool]:
    """Offload or reload weights, of which one unit of two is too large."""
    model = nn.ModuleList([nn.Linear(9, 9), nn.Linear(*LARGE, bias=False)])
    engine, *_ = zero_deepspeed.initialize(model=model, config=config(stage))
    before = engine.module_state_dict()
    assert engine.optimizer is not None
    stepped = [p for group in engine.optimizer.param_groups for p in group["params"]]
    values = [tensor.detach().clone() for tensor in stepped]
    if which == "reload":
        engine.offload_states(WEIGHTS)
    move = engine.reload_states if which == "reload" else partial(engine.offload_states, WEIGHTS)
    with no_memory(), pytest.raises(RuntimeError, match="can't allocate memory"):
        move()
    with pytest.raises(ZeroError, match="are offloaded"):
        engine.module_state_dict()
    for param in engine.module.parameters():
        param.sum()  # NaN, and not what is at address 0
    readable = all(map(torch.equal, stepped, values))
    engine.reload_states()
    after = engine.module_state_dict()
    return readable, all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("which", ["offload", "reload"])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.corners(stage=[0])
def test_a_move_that_finds_no_memory_loses_nothing_and_can_be_undone(
    worlds: WorldPool, stage: int, which: str
) -> None:
    assert worlds.run(1, move_without_memory, stage, which) == [(True, True)]


def move_everything(stage: int) -> tuple[int, int]:
    engine = make_engine(config(stage, bf16=True))
    train(engine, 1)
    before = bytes_here(engine)
    engine.offload_states()
    return before, bytes_here(engine)


@pytest.mark.parametrize("stage", [0, 3])
def test_nothing_stays_on_the_device(worlds: WorldPool, stage: int) -> None:
    before, after = worlds.run(1, move_everything, stage)[0]
    assert before > 0
    assert after == 0


def use_moved(stage: int, include: Any, root: str) -> list[str]:
    """What each use of an engine says, states of which are away."""
    engine = make_engine(config(stage, bf16=True))
    batch = next(iter(engine.training_dataloader))
    loss = engine(batch)
    param = next(engine.module.parameters())
    engine.offload_states(include)
    uses = {
        "forward": lambda: engine(batch),
        "backward": lambda: engine.backward(loss),
        "step": engine.step,
        "save": lambda: engine.save_checkpoint(root),
        "load": lambda: engine.load_checkpoint(root),
        "hash": engine.weight_hash,
        "export": lambda: engine.save_16bit_model(root),
        "parameter": lambda: safe_get_full_fp32_param(param),
    }
    told = []
    for name, use in uses.items():
        try:
            use()
        except ZeroError as error:
            if "are offloaded; call engine.reload_states() first" in str(error):
                told.append(name)
    engine.reload_states()
    engine.backward(loss)
    engine.step()
    return told


def test_using_what_is_away_is_an_error_that_names_it(worlds: WorldPool, tmp_path: Path) -> None:
    everything = ["forward", "backward", "step", "save", "load", "hash", "export", "parameter"]
    assert worlds.run(1, use_moved, 2, None, str(tmp_path))[0] == everything
    # The gradient sums alone: the model still computes and can be exported.
    told = worlds.run(1, use_moved, 3, ["lp_grads"], str(tmp_path))[0]
    assert told == ["backward", "step", "save", "load", "parameter"]


def step_while_away() -> None:
    engine = make_engine(config(1, bf16=True))
    train(engine, 1)
    engine.offload_states(["optim_states"])
    engine(torch.zeros(2, 13, dtype=torch.long))
    engine.step()


def test_a_step_while_states_are_away_says_what_to_call(worlds: WorldPool) -> None:
    with pytest.raises(WorldError, match=r"step\(\) while optim_states are offloaded; call engine"):
        worlds.run(1, step_while_away)


def move_what_is_offloaded(where: str, path: str) -> str:
    engine = make_engine(offloading(3, where, path))
    train(engine, 2)
    engine.offload_states()
    engine.reload_states()
    train(engine, 3)
    return engine.weight_hash()


def test_it_goes_with_an_offloaded_optimizer_and_not_with_offloaded_parameters(
    worlds: WorldPool, tmp_path: Path
) -> None:
    hashes = {
        where: worlds.run(2, move_what_is_offloaded, where, str(tmp_path))[0]
        for where in ("none", "cpu", "nvme")
    }
    assert len(set(hashes.values())) == 1
    with pytest.raises(WorldError, match="offload_param has moved the parameters already"):
        worlds.run(2, move_what_is_offloaded, "nvme+nvme", str(tmp_path))


def move_to(device: str) -> None:
    make_engine(config(1)).offload_states(device=device)


def test_states_go_to_the_cpu_only(worlds: WorldPool) -> None:
    worlds.run(1, move_to, "none")
    for device in ("nvme", "gpu"):
        with pytest.raises(WorldError, match=f"device='{device}'.: states can be moved to"):
            worlds.run(1, move_to, device)
