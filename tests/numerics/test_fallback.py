"""A checkpoint that some rank cannot load, with weights on their way between the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.training import config, fingerprint, make_engine, train
from tests.support.world import WorldPool
from tests.unit.checkpoint.support import flip
from zero_checkpoint import find
from zero_checkpoint.format.pieces import PARAM

WORLD, ENDS_AT = 3, 4


def save_twice(root: str, stage: int, bf16: bool) -> tuple[object, ...]:
    engine = make_engine(config(stage, bf16=bf16))
    for step in (1, 2):
        train(engine, step)
        engine.save_checkpoint(root)
    train(engine, ENDS_AT)
    return fingerprint(engine)


def load_and_end(root: str, stage: int, bf16: bool) -> tuple[object, ...]:
    engine = make_engine(config(stage, bf16=bf16), seed=8)
    engine.load_checkpoint(root)
    assert engine.global_steps == 1
    assert not list(Path(root).glob("*/QUARANTINE"))
    train(engine, ENDS_AT)
    engine.save_checkpoint(root)
    return fingerprint(engine)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", [PARAM, "exp_avg_sq"])
@pytest.mark.corners(kind=[PARAM], stage=[0, 3], bf16=[True])
def test_damage_that_one_rank_finds_makes_all_go_on_from_the_checkpoint_before(
    worlds: WorldPool, tmp_path: Path, kind: str, stage: int, bf16: bool
) -> None:
    ends = worlds.run(WORLD, save_twice, str(tmp_path), stage, bf16)
    newest = find(tmp_path).candidates[0]
    rows, ids = newest.manifest.fragments, list(newest.manifest.tensors)
    row = next(
        n for n, t in enumerate(rows.tensor) if ids[t].kind == kind and rows.file[n] == WORLD - 1
    )
    flip(newest.path / newest.manifest.files[rows.file[row]].name, int(rows.offset[row]))

    assert worlds.run(WORLD, load_and_end, str(tmp_path), stage, bf16) == ends
    assert (newest.path / "QUARANTINE").exists()
