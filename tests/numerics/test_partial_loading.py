"""Loading less than a checkpoint holds, or into a model that has changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zero_deepspeed
from tests.support.models import make_model
from tests.support.training import config, make_engine, train
from tests.support.world import WorldError, WorldPool
from zero_checkpoint import find
from zero_engine.core.engine import Engine

# ---- what is loaded ----


def save_one(root: str, exclude_frozen: bool = False) -> dict[str, torch.Tensor]:
    """Train a little and save; the weights, in fp32."""
    engine = make_engine(config(2))
    train(engine, 1)
    engine.save_checkpoint(root, exclude_frozen_parameters=exclude_frozen)
    whole = engine.module_state_dict()
    engine.destroy()
    return whole


def evaluation_engine(dtype: str) -> Engine:
    model = make_model(seed=8)
    settings = {"train_batch_size": 2, "bf16": {"enabled": dtype == "bf16"}}
    engine, *_ = zero_deepspeed.initialize(
        model=model, config=settings, model_parameters=list(model.parameters())
    )
    return engine


def weights_alone(root: str, dtype: str) -> tuple[dict[str, torch.Tensor], int]:
    engine = evaluation_engine(dtype)
    engine.load_checkpoint(root)
    whole = engine.module_state_dict()
    engine.destroy()
    return whole, engine.global_steps


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_engine_without_an_optimizer_loads_the_weights_in_its_own_dtype(
    worlds: WorldPool, tmp_path: Path, dtype: str
) -> None:
    saved = worlds.run(3, save_one, str(tmp_path))[0]
    for loaded, step in worlds.run(2, weights_alone, str(tmp_path), dtype):
        assert step == 1
        assert loaded.keys() == saved.keys()
        for name, value in saved.items():
            rounded = dtype == "bf16" and name != "temperature"  # a buffer keeps its dtype
            assert torch.equal(loaded[name], value.bfloat16() if rounded else value), name


def test_module_only_leaves_optimizer_scheduler_and_position_alone(
    worlds: WorldPool, tmp_path: Path
) -> None:
    saved = worlds.run(2, save_one, str(tmp_path))[0]
    for loaded, step, moments in worlds.run(
        2, load_partly, str(tmp_path), {"load_module_only": True}
    ):
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
        assert (step, moments) == (3, True)


def test_without_optimizer_states_the_position_is_loaded_and_the_moments_stay(
    worlds: WorldPool, tmp_path: Path
) -> None:
    saved = worlds.run(2, save_one, str(tmp_path))[0]
    options = {"load_optimizer_states": False}
    for loaded, step, moments in worlds.run(2, load_partly, str(tmp_path), options):
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
        assert (step, moments) == (1, True)


def load_partly(root: str, options: dict[str, bool]) -> tuple[dict[str, torch.Tensor], int, bool]:
    """After three steps of another model; also, whether its moments are still there."""
    engine = make_engine(config(1), seed=8)
    train(engine, 3)
    optimizer = engine.optimizer
    assert optimizer is not None
    before = {k: v["exp_avg"].clone() for k, v in optimizer.state.items()}
    engine.load_checkpoint(root, **options)  # type: ignore[arg-type]
    after = {k: v["exp_avg"] for k, v in optimizer.state.items()}
    stayed = all(torch.equal(after[k], moments) for k, moments in before.items())
    whole = engine.module_state_dict()
    engine.destroy()
    return whole, engine.global_steps, stayed and bool(before)


def test_frozen_parameters_that_were_left_out_stay_as_the_script_made_them(
    worlds: WorldPool, tmp_path: Path
) -> None:
    saved = worlds.run(2, save_one, str(tmp_path), True)[0]
    stored = {t.fqn for t in find(tmp_path).candidates[0].manifest.tensors}
    frozen = {"blocks.0.scale", "blocks.1.scale"}
    assert frozen.isdisjoint(stored)
    own = make_model(seed=8).state_dict()
    for loaded, _, _ in worlds.run(3, load_partly, str(tmp_path), {}):
        for name, value in saved.items():
            assert torch.equal(loaded[name], own[name] if name in frozen else value), name


def load_changed(root: str, options: dict[str, bool]) -> tuple[torch.Tensor, torch.Tensor]:
    """Into a model that has one parameter more and one less."""
    model = make_model(seed=8)
    del model.unused
    model.extra = torch.nn.Parameter(torch.ones(5))
    engine, *_ = zero_deepspeed.initialize(
        model=model, config=config(2), model_parameters=list(model.parameters())
    )
    engine.load_checkpoint(root, **options)  # type: ignore[arg-type]
    whole = engine.module_state_dict()
    engine.destroy()
    return whole["embed.weight"], whole["extra"]


def test_a_changed_model_loads_what_it_has_in_common_if_asked_to(
    worlds: WorldPool, tmp_path: Path
) -> None:
    saved = worlds.run(2, save_one, str(tmp_path))[0]
    options = {"load_module_strict": False, "load_optimizer_states": False}
    for embed, extra in worlds.run(2, load_changed, str(tmp_path), options):
        assert torch.equal(embed, saved["embed.weight"])
        assert torch.equal(extra, torch.ones(5))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"load_optimizer_states": False}, "1 missing in the checkpoint: param/extra; 1 extra"),
        ({"load_module_strict": False}, "or load with load_optimizer_states=False"),
    ],
)
def test_a_changed_model_is_refused_otherwise_and_the_remedy_named(
    worlds: WorldPool, tmp_path: Path, options: dict[str, bool], says: str
) -> None:
    worlds.run(1, save_one, str(tmp_path))
    with pytest.raises(WorldError, match=says):
        worlds.run(1, load_changed, str(tmp_path), options)


def save_as_the_readme_does(root: str) -> list[int]:
    """Ask after every micro-step, of which a step here has three or five."""
    engine = make_engine(config(1))
    saved: list[int] = []
    loader = engine.training_dataloader
    assert loader is not None
    while engine.global_steps < 6:
        for batch in loader:
            engine.backward(engine(batch))
            engine.step()
            if engine.checkpoint_due(every_steps=2):
                assert engine.save_checkpoint(root)
                saved.append(engine.global_steps)
    engine.destroy()
    return saved


@pytest.mark.parametrize("world", [1, 2])
def test_a_script_that_asks_after_every_micro_step_saves_once_per_step_that_is_due(
    worlds: WorldPool, tmp_path: Path, world: int
) -> None:
    assert worlds.run(world, save_as_the_readme_does, str(tmp_path)) == [[2, 4, 6]] * world
