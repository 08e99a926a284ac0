"""What is left of a run that has tried to load what it cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.numerics.test_offload import offloading
from tests.numerics.test_resume import halving, state_of
from tests.support.inside import persistence_of
from tests.support.models import make_model
from tests.support.training import config, fingerprint, make_engine, train
from tests.support.world import WorldPool
from tests.unit.checkpoint.support import flip
from zero_checkpoint import find
from zero_checkpoint.errors import DamagedCheckpoint, ModelMismatch
from zero_checkpoint.loading import reader
from zero_contract.errors import ZeroError
from zero_deepspeed.engine import Engine
from zero_deepspeed.utils import safe_get_full_fp32_param

WORLD, REFUSED_AT, ENDS_AT = 3, 2, 4

CASES: list[tuple[int, str, dict[str, Any]]] = [
    *((stage, "none", {"bf16": bf16}) for stage in (0, 1, 2, 3) for bf16 in (False, True)),
    (2, "none", {"fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 2}}),
    (2, "cpu", {"bf16": True}),
    (3, "nvme+nvme", {"bf16": True}),
    (1, "none", {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}),
    (1, "none", {"optimizer": {"type": "Adafactor", "params": {"lr": 1e-2}}}),
    (3, "none", {"optimizer": {"type": "Adafactor", "params": {"lr": 1e-2}}}),
]
"""Stage, tier, and the rest of the config; Muon looks at whole parameters, Adafactor owns them."""


def engine_of(case: tuple[Any, ...], path: str, model: nn.Module | None = None) -> Engine:
    stage, where, more = case
    settings = offloading(stage, where, path, **more)
    return make_engine(settings, model=model, lr_scheduler=halving)


def save_another_model(case: tuple[Any, ...], path: str, root: str) -> None:
    model = make_model(8)
    del model.unused
    engine = engine_of(case, path, model)
    train(engine, 1)
    engine.save_checkpoint(root)


def everything(engine: Engine) -> tuple[Any, ...]:
    where = persistence_of(engine).script.leaves_to
    return state_of(engine), fingerprint(engine), engine.global_steps, engine.micro_steps, where


def refuse_and_end(case: tuple[Any, ...], path: str, root: str) -> tuple[Any, ...]:
    """Two engines, of which the second meets a checkpoint of another model on its way."""
    ends = []
    for refused in (False, True):
        engine = engine_of(case, path)
        train(engine, REFUSED_AT)
        before = everything(engine)
        if refused:
            with pytest.raises(ModelMismatch, match="missing in the checkpoint: param/unused"):
                engine.load_checkpoint(root)
            assert everything(engine) == before
        train(engine, ENDS_AT)
        ends.append(everything(engine))
    return tuple(ends)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.corners(case=[CASES[0], CASES[-1]])
def test_after_a_refused_load_training_goes_on_as_if_it_had_not_been_tried(
    worlds: WorldPool, tmp_path: Path, case: tuple[Any, ...]
) -> None:
    root = str(tmp_path / "checkpoints")
    worlds.run(WORLD, save_another_model, case, str(tmp_path), root)
    for undisturbed, refused in worlds.run(WORLD, refuse_and_end, case, str(tmp_path), root):
        assert refused == undisturbed


def batch_of_world(micro_batch: int, model: nn.Module | None = None) -> Engine:
    """An engine whose global batch follows from the world size, or from a checkpoint."""
    settings = config(1, gradient_accumulation_steps=2)
    settings |= {"train_batch_size": None, "train_micro_batch_size_per_gpu": micro_batch}
    return make_engine(settings, model=model)


def save_another_batch(root: str) -> None:
    model = make_model(8)
    del model.unused
    engine = batch_of_world(1, model)
    train(engine, 1)
    engine.save_checkpoint(root)


def refuse_another_batch(root: str, optimizer: bool) -> list[tuple[Any, ...]]:
    ends = []
    for refused in (False, True):
        engine = batch_of_world(2)
        if refused:
            with pytest.raises(ModelMismatch, match="param/unused"):
                engine.load_checkpoint(root, load_optimizer_states=optimizer)
        train(engine, 1)
        ends.append((engine.train_batch_size(), *fingerprint(engine)))
    return ends


@pytest.mark.parametrize("optimizer", [True, False])
def test_after_a_refused_load_the_batch_is_not_that_of_the_checkpoint(
    worlds: WorldPool, tmp_path: Path, optimizer: bool
) -> None:
    worlds.run(2, save_another_batch, str(tmp_path))
    for undisturbed, refused in worlds.run(2, refuse_another_batch, str(tmp_path), optimizer):
        assert refused == undisturbed
        assert refused[0] == 8


# ---- another optimizer ----

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
LION = {"type": "Lion", "params": {"lr": 1e-3}}


def save_with(root: str, optimizer: dict[str, Any]) -> None:
    engine = make_engine(config(1, optimizer=optimizer))
    train(engine, REFUSED_AT)
    engine.save_checkpoint(root)


def load_with(root: str, optimizer: dict[str, Any]) -> tuple[str, int]:
    """What is said, and the step from which the weights alone go on."""
    engine = make_engine(config(1, optimizer=optimizer))
    with pytest.raises(ModelMismatch) as refusal:
        engine.load_checkpoint(root)
    engine.load_checkpoint(root, load_optimizer_states=False)
    begun_at = engine.global_steps
    train(engine, ENDS_AT)
    return str(refusal.value), begun_at


@pytest.mark.parametrize(
    ("saved", "given", "why"),
    [
        (SGD, ADAMW, "SGD, and only one of it and AdamW has amsgrad, betas, "),
        (ADAMW, SGD, "AdamW, and only one of it and SGD has amsgrad, betas, "),
        (LION, ADAMW, "Lion, and only one of it and AdamW has amsgrad, "),
        (ADAMW, LION, "AdamW, and only one of it and Lion has amsgrad, "),
    ],
)
def test_the_state_of_another_optimizer_is_refused_and_the_weights_can_be_had_without_it(
    worlds: WorldPool, tmp_path: Path, saved: dict[str, Any], given: dict[str, Any], why: str
) -> None:
    worlds.run(2, save_with, str(tmp_path), saved)
    for text, begun_at in worlds.run(2, load_with, str(tmp_path), given):
        assert text.startswith("checkpoint global_step2: its optimizer state is that of " + why)
        assert text.endswith("or load with load_optimizer_states=False")
        assert begun_at == REFUSED_AT


def load_and_end(root: str, optimizer: dict[str, Any]) -> tuple[Any, ...]:
    engine = make_engine(config(1, optimizer=optimizer))
    engine.load_checkpoint(root)
    train(engine, ENDS_AT)
    return fingerprint(engine)


def test_adam_goes_on_with_the_state_of_adamw_as_adamw_would(
    worlds: WorldPool, tmp_path: Path
) -> None:
    worlds.run(2, save_with, str(tmp_path), ADAMW)
    adam = {"type": "Adam", "params": {"lr": 1e-2, "adam_w_mode": False}}
    undisturbed = worlds.run(2, load_and_end, str(tmp_path), ADAMW)
    assert worlds.run(2, load_and_end, str(tmp_path), adam) == undisturbed


# ---- half a load ----


def save_at(root: str, stage: int, *steps: int) -> tuple[Any, ...]:
    engine = make_engine(config(stage))
    for step in steps:
        train(engine, step)
        engine.save_checkpoint(root)
    train(engine, ENDS_AT)
    return fingerprint(engine)


def flip_a_moment(root: Path) -> None:
    """Damage what is read last: the weights have been by then."""
    candidate = find(root).candidates[0]
    rows, ids = candidate.manifest.fragments, list(candidate.manifest.tensors)
    row = max(n for n, t in enumerate(rows.tensor) if ids[t].kind == "exp_avg_sq")
    flip(candidate.path / candidate.manifest.files[rows.file[row]].name, int(rows.offset[row]))


def uses(engine: Engine, root: str) -> dict[str, Callable[[], Any]]:
    assert engine.training_dataloader is not None
    batch = next(iter(engine.training_dataloader))
    weight = next(engine.module.parameters())
    return {
        "forward": lambda: engine(batch),
        "step()": engine.step,
        "save_checkpoint()": lambda: engine.save_checkpoint(root),
        "weight_hash()": engine.weight_hash,
        "module_state_dict()": engine.module_state_dict,
        "reading or changing a parameter": lambda: safe_get_full_fp32_param(weight),
        "initialize() once more": lambda: make_engine(config(0), model=engine.module),
    }


def refused(engine: Engine, root: str) -> set[str]:
    """What is refused because of half a load, all in the same words."""
    found, reasons = set(), set()
    for what, use in uses(engine, root).items():
        try:
            use()
        except ZeroError as error:
            name, _, reason = str(error).partition(": ")
            assert name == what
            found.add(what)
            reasons.add(reason)
    assert len(reasons) == bool(found)
    return found


def go_on_after_damage(root: str, good: str, stage: int) -> tuple[Any, ...]:
    engine = make_engine(config(stage), seed=8)
    train(engine, 1)
    everything_refused = set(uses(engine, root))
    with pytest.raises(DamagedCheckpoint, match="Restore one of them"):
        engine.load_checkpoint(root)
    assert refused(engine, root) == everything_refused
    with pytest.raises(ZeroError, match="because a load has failed: no usable checkpoint under"):
        engine.step()
    with pytest.raises(DamagedCheckpoint):
        engine.load_checkpoint(root)
    engine.load_checkpoint(good, load_module_only=True)
    assert refused(engine, root) == everything_refused  # there are no moments
    engine.load_checkpoint(good)
    train(engine, ENDS_AT)
    return fingerprint(engine)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.corners(stage=[3])
def test_nothing_is_made_of_what_a_damaged_checkpoint_has_left_until_another_is_loaded(
    worlds: WorldPool, tmp_path: Path, stage: int
) -> None:
    bad, good = tmp_path / "bad", tmp_path / "good"
    worlds.run(WORLD, save_at, str(bad), stage, 1)
    ends = worlds.run(WORLD, save_at, str(good), stage, 2)
    flip_a_moment(bad)
    assert worlds.run(WORLD, go_on_after_damage, str(bad), str(good), stage) == ends
    assert find(bad).rejected == ()  # nobody has saved there
    assert len(find(bad).candidates) == 1


def try_the_older_one(root: str) -> set[str]:
    """The newest is damaged, and the one before is another model's."""
    engine = make_engine(config(1), seed=8)
    with pytest.raises(ModelMismatch):
        engine.load_checkpoint(root)
    return refused(engine, root)


def test_a_refusal_after_falling_back_is_no_refusal_of_all(
    worlds: WorldPool, tmp_path: Path
) -> None:
    case = (1, "none", {})
    worlds.run(WORLD, save_another_model, case, str(tmp_path), str(tmp_path))
    worlds.run(WORLD, save_at, str(tmp_path), 1, 2)
    newest = find(tmp_path).candidates[0]
    flip(newest.path / newest.manifest.files[0].name, newest.manifest.files[0].data_offset)
    for found in worlds.run(WORLD, try_the_older_one, str(tmp_path)):
        assert "save_checkpoint()" in found


def save_a_part_and_all(root: str, *wholes: bool) -> None:
    engine = make_engine(config(1))
    for step, whole in enumerate(wholes, 1):
        train(engine, step)
        engine.save_checkpoint(root, exclude_frozen_parameters=not whole)


def fall_back_to_a_part(root: str, tag: str) -> None:
    engine = make_engine(config(1), seed=8)
    with pytest.raises(DamagedCheckpoint, match=r"does not have 2 tensors .* blocks\.0\.scale"):
        engine.load_checkpoint(root)
    with pytest.raises(ModelMismatch, match=r"does not have 2 parameters .* blocks\.0\.scale"):
        engine.load_checkpoint(root, tag)


def fall_back(root: str) -> int:
    engine = make_engine(config(1), seed=8)
    engine.load_checkpoint(root)
    return engine.global_steps


def test_what_a_damaged_checkpoint_has_left_in_frozen_parameters_is_not_kept(
    worlds: WorldPool, tmp_path: Path
) -> None:
    parts, older = tmp_path / "parts", tmp_path / "older"
    worlds.run(WORLD, save_a_part_and_all, str(parts), False, True)
    flip_a_moment(parts)
    worlds.run(WORLD, fall_back_to_a_part, str(parts), "global_step1")
    worlds.run(WORLD, save_a_part_and_all, str(older), True, False, True)
    flip_a_moment(older)
    assert worlds.run(WORLD, fall_back, str(older)) == [1] * WORLD


def with_buffer(root: str, has_it: bool, loads: bool) -> None:
    model = make_model(seed=8)
    if has_it:
        model.register_buffer("late", torch.arange(5.0))
    engine = make_engine(config(1), model=model)
    if not loads:
        train(engine, int(has_it))
        engine.save_checkpoint(root)
        return
    for tag, error in ((None, DamagedCheckpoint), ("global_step0", ModelMismatch)):
        with pytest.raises(error, match="late"):
            engine.load_checkpoint(root, tag, load_module_strict=False, load_optimizer_states=False)


def test_what_a_damaged_checkpoint_has_left_in_a_buffer_is_not_kept(
    worlds: WorldPool, tmp_path: Path
) -> None:
    """A load that is not strict takes a checkpoint without it."""
    worlds.run(WORLD, with_buffer, str(tmp_path), False, False)
    (without,) = find(tmp_path).candidates
    worlds.run(WORLD, with_buffer, str(tmp_path), True, False)
    damaged = next(c for c in find(tmp_path).candidates if c.path != without.path)
    rows, ids = damaged.manifest.fragments, list(damaged.manifest.tensors)
    row = next(n for n, t in enumerate(rows.tensor) if ids[t].fqn == "late")
    flip(damaged.path / damaged.manifest.files[rows.file[row]].name, int(rows.offset[row]))
    worlds.run(WORLD, with_buffer, str(tmp_path), True, True)


def interrupt_a_load(root: str, module_only: bool) -> tuple[set[str], int]:
    """Ctrl-C when the weights are there; then the same load once more, and a step."""
    engine = make_engine(config(1), seed=8)
    read = reader._Reader.read

    def interrupted(self: Any, reads: Any) -> int:
        read(self, reads)
        raise KeyboardInterrupt

    reader._Reader.read = interrupted  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.load_checkpoint(root, load_module_only=module_only)
    finally:
        reader._Reader.read = read  # type: ignore[method-assign]
    before = refused(engine, root)
    engine.load_checkpoint(root, load_module_only=module_only)
    begun_at = engine.global_steps
    train(engine, begun_at + 1)
    return before, begun_at


@pytest.mark.parametrize("module_only", [False, True])
def test_a_load_that_is_interrupted_leaves_nothing_to_go_on_with_but_itself(
    worlds: WorldPool, tmp_path: Path, module_only: bool
) -> None:
    worlds.run(1, save_at, str(tmp_path), 1, 2)
    ((before, begun_at),) = worlds.run(1, interrupt_a_load, str(tmp_path), module_only)
    assert "save_checkpoint()" in before
    assert begun_at == (0 if module_only else 2)
