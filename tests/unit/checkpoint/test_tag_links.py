"""A checkpoint is also where DeepSpeed's scripts look for one: under its tag."""

from __future__ import annotations

import os

import pytest

from tests.unit.checkpoint.support import adam_state, blank, load_all, names, same_bits, saved
from zero_checkpoint import find
from zero_checkpoint.saving.retention import remove


def test_a_checkpoint_is_found_under_its_tag(tmp_path):
    first, second = (saved(tmp_path, adam_state(), step=n, tag=f"global_step{n}") for n in (1, 2))
    assert os.readlink(tmp_path / "global_step1") == first.name
    assert os.readlink(tmp_path / "global_step2") == second.name
    assert [candidate.path for candidate in find(tmp_path).candidates] == [second, first]


def test_a_tag_leads_to_the_newest_checkpoint_that_has_it(tmp_path):
    saved(tmp_path, adam_state(), step=1, tag="best")
    newer = saved(tmp_path, adam_state(), step=2, tag="best")
    assert os.readlink(tmp_path / "best") == newer.name


def test_the_tag_goes_with_its_checkpoint(tmp_path):
    old = saved(tmp_path, adam_state(), step=1, tag="old")
    new = saved(tmp_path, adam_state(), step=2, tag="new")
    remove(old)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "new", new.name]


def test_a_link_of_somebodys_own_stays_though_it_leads_nowhere_just_now(tmp_path):
    old = saved(tmp_path, adam_state(), step=1, tag="old")
    (tmp_path / "archive").symlink_to("/mnt/not-mounted/archive")
    remove(old)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "latest"]


@pytest.mark.parametrize("tag", ["a/b", "latest", ".hidden", "removed.x", "step-000000007.g1.abcd"])
def test_a_tag_that_would_be_taken_for_something_else_is_no_link(tmp_path, tag):
    path = saved(tmp_path, adam_state(), tag=tag)
    assert {name.partition("/")[0] for name in names(tmp_path)} == {"latest", path.name}
    assert find(tmp_path).candidates[0].manifest.tag == tag


def test_what_already_has_the_name_of_the_tag_stays(tmp_path, caplog):
    (tmp_path / "global_step1").mkdir()
    (tmp_path / "global_step1" / "of_deepspeed").touch()
    path = saved(tmp_path, adam_state(), tag="global_step1")
    assert [candidate.path for candidate in find(tmp_path).candidates] == [path]
    assert (tmp_path / "global_step1" / "of_deepspeed").exists()
    assert f"{path} is saved, but {tmp_path / 'global_step1'} could not be updated" in caplog.text


def test_a_tag_that_no_file_can_have_as_its_name_is_no_link(tmp_path, caplog):
    path = saved(tmp_path, adam_state(), tag="of\0zeros")
    assert [candidate.path for candidate in find(tmp_path).candidates] == [path]
    assert f"{path} is saved, but" in caplog.text


def test_what_latest_says_can_be_given_as_a_tag(tmp_path):
    full = adam_state()
    for step in (1, 2):
        saved(tmp_path, full, step=step, tag=f"t{step}")
    target = blank(full)
    [loaded, _] = load_all(tmp_path, target, tag=(tmp_path / "latest").read_text().strip())
    assert loaded.manifest.tag == "t2"
    assert same_bits(full, target)
