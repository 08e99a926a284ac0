"""What is left of a run that has tried to load what it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.numerics.test_offload import offloading
from tests.numerics.test_resume import halving, state_of
from tests.support.models import make_model
from tests.support.training import fingerprint, make_engine, train
from tests.support.world import WorldPool
from zero_engine.engine import Engine
from zero_engine.errors import ModelMismatch

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
    where = engine._persistence._directory
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
def test_after_a_refused_load_training_goes_on_as_if_it_had_not_been_tried(
    worlds: WorldPool, tmp_path: Path, case: tuple[Any, ...]
) -> None:
    root = str(tmp_path / "checkpoints")
    worlds.run(WORLD, save_another_model, case, str(tmp_path), root)
    for undisturbed, refused in worlds.run(WORLD, refuse_and_end, case, str(tmp_path), root):
        assert refused == undisturbed
