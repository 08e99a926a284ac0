"""`save_latest=False`: a checkpoint that only a load which names it takes."""

from __future__ import annotations

from pathlib import Path

from tests.support.saving import heard
from tests.support.training import config, make_engine, train
from tests.support.world import WorldPool
from zero_checkpoint import find


def save_aside(root: str) -> list[int]:
    engine = make_engine(config(1, checkpoint={"keep_last": 2}))
    for step, tag, latest in (
        (1, "side", False),
        (2, None, True),
        (3, None, True),
        (4, "best", False),
        (5, "other", False),
    ):
        train(engine, step)
        engine.save_checkpoint(root, tag, save_latest=latest)
    loaded = []
    for tag in (None, "best", "side"):
        engine.load_checkpoint(root, tag)
        loaded.append(engine.global_steps)
    return loaded


def test_a_load_without_a_tag_takes_no_checkpoint_that_was_saved_aside(
    worlds: WorldPool, tmp_path: Path
) -> None:
    assert worlds.run(2, save_aside, str(tmp_path)) == [[3, 4, 1]] * 2
    # Those aside are neither counted nor deleted.
    assert sorted(c.manifest.step for c in find(tmp_path).candidates) == [1, 2, 3, 4, 5]
    assert (tmp_path / "latest").read_text().startswith("step-000000003.")
    assert (tmp_path / "best").is_dir()


def only_aside(root: str) -> tuple[str | None, list[str]]:
    engine = make_engine(config(1))
    train(engine, 1)
    engine.save_checkpoint(root, "best", save_latest=False)
    with heard() as lines:
        path, _ = make_engine(config(1)).load_checkpoint(root)
    return path, [line for line in lines if "aside" in line]


def test_a_start_from_nothing_beside_checkpoints_that_were_saved_aside_is_said(
    worlds: WorldPool, tmp_path: Path
) -> None:
    said = f"{tmp_path}: all checkpoints here were saved aside; to load one, name its tag: best"
    assert worlds.run(2, only_aside, str(tmp_path)) == [(None, [said]), (None, [])]
