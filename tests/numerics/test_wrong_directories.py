"""Loading from, and saving to, what is no directory of checkpoints."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from tests.numerics.test_leaving import under_agent
from tests.support.saving import heard
from tests.support.training import config, make_engine, train
from tests.support.world import WorldPool
from zero_checkpoint import find
from zero_checkpoint.errors import CheckpointError
from zero_contract.worker import ENV_RUN, CommitRequest


def try_them(root: str) -> list[str]:
    """What is said of a checkpoint, of its tag, and of a file, by a load and by a save."""
    engine = make_engine(config(1))
    train(engine, 1)
    engine.save_checkpoint(root)
    path, _ = engine.load_checkpoint(root)
    assert path is not None
    (Path(root) / "file").touch()
    said = []
    for where in (path, f"{root}/global_step1", f"{root}/file"):
        for use in (engine.load_checkpoint, engine.save_checkpoint):
            with pytest.raises(CheckpointError) as refusal:
                use(where)
            said.append(str(refusal.value).replace(root, "ROOT").replace(Path(path).name, "STEP"))
    before = engine.weight_hash()
    assert engine.load_checkpoint(root, tag=Path(path).name)[0] == path
    assert engine.weight_hash() == before
    return said


def test_a_checkpoint_or_a_file_in_the_place_of_the_directory_is_no_fresh_start(
    worlds: WorldPool, tmp_path: Path
) -> None:
    one = "is one checkpoint; give the directory above, ROOT, and its name as the tag"
    for said in worlds.run(2, try_them, str(tmp_path)):
        assert [sentence.rpartition(": ROOT")[2] for sentence in said] == [
            *[f"/STEP {one}"] * 2,
            *[f"/global_step1 {one}"] * 2,
            *["/file: this is a file; give a directory of checkpoints"] * 2,
        ]


def load_beside(root: str) -> tuple[str | None, list[str]]:
    engine = make_engine(config(1))
    with heard() as lines:
        path, _ = engine.load_checkpoint(root)
    return path, [line for line in lines if "import" in line]


def test_a_fresh_start_beside_a_checkpoint_of_deepspeed_names_the_import(
    worlds: WorldPool, tmp_path: Path
) -> None:
    (tmp_path / "mp_rank_00_model_states.pt").touch()
    told = (
        f"{tmp_path}: there are no checkpoints here; it looks like a checkpoint of DeepSpeed: "
        f"zero-ckpt import {tmp_path} DIR --from deepspeed"
    )
    assert worlds.run(2, load_beside, str(tmp_path)) == [(None, [told]), (None, [])]


def save_to_names_of_their_own(root: str) -> tuple[list[str], bool]:
    """As a script that names its directory after the time, and makes it on rank 0."""
    engine = make_engine(config(1))
    train(engine, 1)
    rank = engine.global_rank
    own = Path(root, f"run-{rank}")
    if rank == 0:
        own.mkdir()
    with heard() as lines:
        assert engine.save_checkpoint(own)
    before = engine.weight_hash()
    train(engine, 1)
    engine.load_checkpoint(f"{root}/run-0")
    return [line for line in lines if "rank 0 has named" in line], engine.weight_hash() == before


def test_where_ranks_name_a_directory_apart_rank_0_s_is_taken(
    worlds: WorldPool, tmp_path: Path
) -> None:
    (told_0, same_0), (told_1, same_1) = worlds.run(2, save_to_names_of_their_own, str(tmp_path))
    assert same_0
    assert same_1
    assert told_0 == []
    assert len(told_1) == 1
    assert f"save_checkpoint('{tmp_path}/run-1'): rank 0 has named {tmp_path}/run-0" in told_1[0]
    assert [path.name for path in tmp_path.iterdir()] == ["run-0"]


def save_here_and_there(root: str) -> list[str]:
    """What etcd is told of where the job resumes from, with each save."""
    engine = make_engine(config(1))
    engine.save_checkpoint(f"{root}/before")
    engine.destroy()
    with under_agent(root) as agent:
        os.environ[ENV_RUN] = "another run"
        for start in range(2):
            engine = make_engine(config(1, checkpoint={"async": True}))
            if engine.load_checkpoint(f"{root}/ck")[0] is None:
                engine.load_checkpoint(f"{root}/before")
            for step, name in enumerate(["best", "ck", "best"], 3 * start + 1):
                train(engine, step)
                assert engine.save_checkpoint(f"{root}/{name}")
            if start:
                engine.destroy()
            else:
                engine.wait_for_checkpoint()
        del os.environ[ENV_RUN]
        said = [each.root for each in agent.told() if isinstance(each, CommitRequest)]
    return [where.removeprefix(root) for where in said]


def test_a_job_is_said_to_resume_from_a_directory_once_that_has_a_checkpoint(
    worlds: WorldPool, tmp_path: Path
) -> None:
    """A restart before is to begin from scratch, and one after it is not."""
    assert worlds.run(1, save_here_and_there, str(tmp_path)) == [["", *["/ck"] * 5]]


def save_and_go_elsewhere(here: str, there: str) -> None:
    """Each rank changes its directory between a relative save and what follows of it."""
    engine = make_engine(config(1, checkpoint={"async": True}))
    with contextlib.chdir(here):
        engine.load_checkpoint("ck")
        train(engine, 1)
        assert engine.save_checkpoint("ck")
    with contextlib.chdir(there):
        engine.destroy()


def test_a_relative_directory_is_that_of_the_moment_in_which_it_is_named(
    worlds: WorldPool, tmp_path: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    worlds.run(2, save_and_go_elsewhere, str(here), str(there))
    assert [one.manifest.step for one in find(here / "ck").candidates] == [1]
    assert list(there.iterdir()) == []
