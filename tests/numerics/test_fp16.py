"""fp16 training: one result at every stage and world size, overflows included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import zero_deepspeed
from tests.support.training import config, fingerprint, make_engine, train
from tests.support.world import WorldError, WorldPool
from zero_contract.errors import ZeroError
from zero_deepspeed.engine import Engine

STAGES = (0, 1, 2, 3)
STEPS = 6
FP16 = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 2, "hysteresis": 1}
"""2**24 overflows at once, and two clean steps bring an overflow back."""


def fp16_config(stage: int, **more: Any) -> dict[str, Any]:
    return config(stage, fp16=FP16, **more)


def train_at(stages: tuple[int, ...]) -> list[tuple[Any, ...]]:
    results = []
    for stage in stages:
        engine = make_engine(fp16_config(stage))
        scales = []
        for step in range(1, STEPS + 1):
            train(engine, step)
            scales.append(engine.optimizer.cur_scale)
        results.append((*fingerprint(engine), tuple(scales), engine.skipped_steps))
    return results


@pytest.fixture(scope="module")
def reference(worlds: WorldPool) -> tuple[Any, ...]:
    return worlds.run(1, train_at, (0,))[0][0]


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.corners(world=[3])
def test_every_stage_and_world_size_gives_the_same_bits_and_scales(
    worlds: WorldPool, reference: tuple[Any, ...], world: int
) -> None:
    assert worlds.run(world, train_at, STAGES) == [[reference] * len(STAGES)] * world


def test_the_run_above_has_overflows_and_clean_steps(reference: tuple[Any, ...]) -> None:
    *_, scales, skipped = reference
    assert 0 < skipped < STEPS
    assert len(set(scales)) > 2


def test_the_norm_is_that_of_the_loss_without_its_scale(worlds: WorldPool) -> None:
    """Powers of two change no bit of a gradient that neither overflows nor underflows."""
    assert len(set(worlds.run(1, norms_at_scales, [2.0, 8.0, 32.0])[0])) == 1


def norms_at_scales(scales: list[float]) -> list[tuple[Any, ...]]:
    seen = []
    for scale in scales:
        torch.manual_seed(0)
        engine = line_engine(fp16={"enabled": True, "loss_scale": scale, "auto_cast": True})
        engine.backward(engine(torch.ones(2, 4)).float().square().mean())
        engine.step()
        assert engine.optimizer.loss_scale == scale
        seen.append((engine.get_global_grad_norm(), engine.mean_loss, engine.weight_hash()))
    return seen


@pytest.mark.parametrize("scale", [1000.0, 1024.0])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.corners(stage=[0, 3])
def test_a_step_that_is_refused_can_be_made_again(
    worlds: WorldPool, stage: int, scale: float
) -> None:
    for undisturbed, refused in worlds.run(2, norms_after_refusals, stage, scale):
        assert refused == pytest.approx(undisturbed, rel=1e-6)


def norms_after_refusals(stage: int, scale: float) -> list[float | None]:
    norms = []
    for refusals in (0, 2):
        engine = make_engine(config(stage, fp16={"enabled": True, "loss_scale": scale}))
        (group, *_), batches = engine.optimizer.param_groups, iter(engine.training_dataloader)
        while engine.global_steps < 1:
            engine.backward(engine(next(batches)))
            if engine.is_gradient_accumulation_boundary():
                lr = group["lr"]
                group["lr"] = lr * (1 + engine.global_rank)
                for _ in range(refusals):
                    with pytest.raises(ZeroError, match="lr"):
                        engine.step()
                group["lr"] = lr
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


def line_engine(**more: Any) -> Engine:
    settings = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 2, **more}
    settings.setdefault("optimizer", {"type": "SGD", "params": {"lr": 0.1}})
    engine, *_ = zero_deepspeed.initialize(model=nn.Linear(4, 1), config=settings)
    return engine


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.corners(stage=[0, 3])
def test_scale_and_a_plain_backward_do_what_engine_backward_does(
    worlds: WorldPool, stage: int
) -> None:
    for results in worlds.run(2, plain_and_engine_backward, stage):
        assert results[0] == results[1]


def plain_and_engine_backward(stage: int) -> list[tuple[Any, ...]]:
    results = []
    for plain in (False, True):
        engine = make_engine(fp16_config(stage))
        while engine.global_steps < STEPS:
            for batch in engine.training_dataloader:
                loss = engine(batch)
                if plain:
                    (engine.scale(loss) + 0).backward()  # any tensor made from it will do
                else:
                    engine.backward(loss)
                engine.step()
        results.append(fingerprint(engine))
    return results


def test_a_resumed_run_goes_on_with_the_scale(
    worlds: WorldPool, reference: tuple[Any, ...], tmp_path: Path
) -> None:
    worlds.run(2, save_after, 3, str(tmp_path))
    assert worlds.run(1, resume, str(tmp_path)) == [reference[:5]]


def save_after(steps: int, root: str) -> None:
    engine = make_engine(fp16_config(3))
    train(engine, steps)
    engine.save_checkpoint(root)


def resume(root: str) -> tuple[Any, ...]:
    engine = make_engine(fp16_config(1), seed=8)
    engine.load_checkpoint(root)
    train(engine, STEPS)
    return fingerprint(engine)


# ---- steps that are skipped ----


@pytest.mark.parametrize("fp16", [{"enabled": True, "initial_scale_power": 1}, {}])
def test_a_run_that_only_skips_ends_with_the_parameter_and_the_remedy(
    worlds: WorldPool, fp16: dict[str, Any]
) -> None:
    """Two overflows use up the hysteresis and the scale of 2; three more are one too many."""
    with pytest.raises(WorldError) as caught:
        worlds.run(2, skip_forever, fp16)
    last = 5 if fp16 else 3
    assert f"step {last} skipped" in str(caught.value)
    assert "first in blocks.1.down.bias" in str(caught.value)
    assert "the last 3 of them in a row: look at the data" in str(caught.value)
    assert ("at its minimum of 1" in str(caught.value)) == bool(fp16)


def skip_forever(fp16: dict[str, Any]) -> None:
    engine = make_engine(config(2, fp16=fp16, elastic={"max_skipped_steps": 3}))
    bias = engine.module.blocks[1].down.bias
    bias.register_hook(lambda gradient: gradient * float("nan"))
    train(engine, 20)


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), index / 8), torch.tensor([index / 4])


def test_auto_cast_takes_fp32_inputs(worlds: WorldPool) -> None:
    with pytest.raises(WorldError, match="dtype"):
        worlds.run(1, train_on_fp32_inputs, False)
    assert len(set(worlds.run(2, train_on_fp32_inputs, True))) == 1


def train_on_fp32_inputs(auto_cast: bool) -> str:
    torch.manual_seed(0)
    fp16 = {"enabled": True, "auto_cast": auto_cast, "initial_scale_power": 4}
    engine, _, loader, _ = zero_deepspeed.initialize(
        model=nn.Linear(4, 1), training_data=Pairs(), config=config(2, fp16=fp16)
    )
    for inputs, targets in loader:
        engine.backward((engine(inputs).float() - targets).square().mean())
        engine.step()
    return engine.weight_hash()


def test_autocast_computes_in_bf16_with_one_result_at_every_stage(worlds: WorldPool) -> None:
    hashes = {h for world in (1, 2) for rank in worlds.run(world, autocast_hashes) for h in rank}
    assert len(hashes) == 1
    assert hashes != {worlds.run(1, plain_hash)[0]}


def autocast_hashes() -> list[str]:
    return [hash_of(config(stage, torch_autocast={"enabled": True})) for stage in (0, 3)]


def plain_hash() -> str:
    return hash_of(config(0))


def test_autocast_beside_bf16_runs_over_bf16_weights(worlds: WorldPool) -> None:
    assert worlds.run(1, autocast_over_bf16) == [{(True, torch.bfloat16)}]


def autocast_over_bf16() -> set[tuple[bool, torch.dtype]]:
    engine = make_engine(config(3, bf16=True, torch_autocast={"enabled": True}))
    seen = set()
    engine.module.register_forward_hook(
        lambda module, *_: seen.add(
            (torch.is_autocast_enabled("cpu"), next(module.parameters()).dtype)
        )
    )
    train(engine, 1)
    return seen


def hash_of(settings: dict[str, Any]) -> str:
    engine = make_engine(settings)
    train(engine, 2)
    return engine.weight_hash()
